"""What verl's own agent loops generate with: a call to the rollout manager, which no pause or hand-over interrupts."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakValueDictionary

from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

from seamless_verl.agent_loops.rows import GENERATED
from seamless_verl.data_plane.actor import Generated
from seamless_verl.data_plane.client import answered, plane_of
from seamless_verl.trajectory.records import Finish

LIMITS = ("max_tokens", "max_new_tokens")  # the second is sglang's name, which verl takes too
OF_THE_ENGINE = ("stop", "extra_args")  # need the engine's own text or transports


class Versions(list[int]):
    """The weight version of each token that a conversation generated; it grows with every turn.

    A loop of several turns keeps what came with the first one, which is this very list.
    """


class SeamlessClient(FullyAsyncLLMServerClient):  # type: ignore[misc]
    """Tokens through the data plane; what only the engine's own door can do goes the way verl's client goes.

    Owned state, of a process and not of a client, which is sent between processes: the versions of each
    conversation's tokens, by its request id, while its agent loop has them.
    """

    conversations: ClassVar[WeakValueDictionary[str, Versions]] = WeakValueDictionary()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        """One generation; `extra_fields` has the oldest and the youngest weight version of its tokens."""
        if any(map(given, others.values())) or any(given(sampling_params.get(name)) for name in OF_THE_ENGINE):
            return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **others)
        ids, name = normalize_token_ids(prompt_ids), str(request_id)
        call = plane_of(self.config, name).generate.remote(name, ids, self.fields(len(ids), sampling_params))
        done = await answered(call, cut=True)
        versions = self.conversations.setdefault(name, Versions())
        versions.extend(done.versions)
        return output_of(done, versions)

    def fields(self, prompt: int, asked: dict[str, Any]) -> dict[str, Any]:
        """vLLM's sampling fields, with the limits and defaults that verl's server would give them.

        Raises:
            ValueError: the prompt leaves no room in the model's length.
        """
        rollout = self.config.actor_rollout_ref.rollout
        longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        if prompt >= longest:
            raise ValueError(f"prompt of {prompt} tokens: rollout.max_model_len={longest} leaves nothing to generate")
        limits = [asked[name] for name in LIMITS if asked.get(name) is not None] or [rollout.response_length]
        fields = {name: value for name, value in asked.items() if name not in (*LIMITS, "logprobs")}
        fields.setdefault("ignore_eos", rollout.get("ignore_eos", False))
        return fields | {"max_tokens": max(1, min(limits[0], longest - prompt))}


def given(value: Any) -> bool:
    """Whether a caller meant something by it: not by None, 0, or nothing in a container."""
    return value is not None and (len(value) > 0 if hasattr(value, "__len__") else bool(value))


def output_of(done: Generated, versions: Versions) -> TokenOutput:
    steps = {"min_global_steps": min(done.versions, default=None), "max_global_steps": max(done.versions, default=None)}
    return TokenOutput(
        token_ids=done.ids,
        log_probs=done.logprobs,
        num_preempted=0,
        stop_reason="completed" if done.finish in (Finish.STOP, Finish.LENGTH) else done.finish,  # as verl says it
        extra_fields={**steps, "global_steps": steps["max_global_steps"], GENERATED: versions},
    )
