"""The LLM client of verl's own agent loops: calls through the data plane, which no pause or hand-over interrupts."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakValueDictionary

from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

from seamless_verl.agent_loops.rows import GENERATED_VERSIONS
from seamless_verl.data_plane.actor import Generated
from seamless_verl.data_plane.client import await_reply, plane_for
from seamless_verl.trajectory.records import Finish

LIMITS = ("max_tokens", "max_new_tokens")  # the second is sglang's name, which verl takes too
ENGINE_ONLY = ("stop", "extra_args")  # need the engine's own text or transports


class Versions(list[int]):
    """The weight version of each token that a conversation generated; it grows with every turn.

    A loop of several turns keeps what came with the first one, which is this very list.
    """


class SeamlessClient(FullyAsyncLLMServerClient):  # type: ignore[misc]
    """Generates through the data plane; what only verl's server can do goes to it, as verl's client would.

    Owned state, of a process and not of a client (clients are sent between processes): the versions of each
    conversation's tokens, by its request id, while its agent loop has them.
    """

    conversations: ClassVar[WeakValueDictionary[str, Versions]] = WeakValueDictionary()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **others: Any
    ) -> TokenOutput:
        """One generation; `extra_fields` has the oldest and the youngest weight version of its tokens."""
        if any(map(is_set, others.values())) or any(is_set(sampling_params.get(name)) for name in ENGINE_ONLY):
            return await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **others)
        ids, name = normalize_token_ids(prompt_ids), str(request_id)
        call = plane_for(self.config, name).generate.remote(name, ids, self.fields(len(ids), sampling_params))
        generated = await await_reply(call, cancels=True)
        versions = self.conversations.setdefault(name, Versions())
        versions.extend(generated.versions)
        return output_of(generated, versions)

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


def is_set(value: Any) -> bool:
    """Whether a caller gave a value: None, 0 and empty containers are none."""
    return value is not None and (len(value) > 0 if hasattr(value, "__len__") else bool(value))


def output_of(generated: Generated, versions: Versions) -> TokenOutput:
    oldest, newest = min(generated.versions, default=None), max(generated.versions, default=None)
    completed = generated.finish in (Finish.STOP, Finish.LENGTH)
    return TokenOutput(
        token_ids=generated.ids,
        log_probs=generated.logprobs,
        num_preempted=0,
        stop_reason="completed" if completed else generated.finish,  # verl's word
        extra_fields={
            "min_global_steps": oldest,
            "max_global_steps": newest,
            "global_steps": newest,
            GENERATED_VERSIONS: versions,
        },
    )
