"""The LLM client of verl's own agent loops, whose calls run in the data plane: no pause or hand-over ends one."""

from __future__ import annotations

import pickle
from array import array
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

from seamless_verl.agent_loops.group import GROUP
from seamless_verl.agent_loops.rows import GENERATED_VERSIONS
from seamless_verl.data_plane.client import await_reply, plane_for
from seamless_verl.data_plane.settings import Generated
from seamless_verl.trajectory.records import TOKEN, Finish
from seamless_verl.trajectory.routes import Routes, joined

LIMITS = ("max_tokens", "max_new_tokens")  # the second is sglang's name, which verl takes too
MEDIA = {"image_data": "image", "video_data": "video", "audio_data": "audio"}  # verl's names, and vLLM's
UNUSED = ("priority", "mm_processor_output")  # the data plane orders calls; the second is for sglang

NO_ROUTES = "routes were asked for, and the reply has none. Look into the replicas' logs for what their engines lack"


class Versions(list[int]):
    """The weight version of each token that a conversation generated; it grows with every turn, for a loop of
    several turns keeps the `extra_fields` of its first turn.

    `ids` are those of its last turn, prompt and reply. `routes`, where engines return them, has a row for each but the
    first of them: a later turn keeps those of what it repeats.
    """

    ids: array[int] = array(TOKEN)
    routes: Routes | None = None

    def routes_from(self, prompt_ids: list[int]) -> int:
        """The first of the prompt's tokens, but the very first, whose route is not known."""
        known = 0 if self.routes is None else len(self.routes) + 1
        same = next((i for i, pair in enumerate(zip(self.ids, prompt_ids, strict=False)) if pair[0] != pair[1]), None)
        return max(1, min(known, len(prompt_ids) if same is None else same))

    def known(self, routes_from: int) -> list[Routes]:
        """The routes before that token, as they are now: another call of the conversation may take their place."""
        return [] if self.routes is None else [self.routes.part(0, routes_from - 1)]

    def add(self, prompt_ids: list[int], generated: Generated, known: list[Routes] | None) -> None:
        """A turn with this prompt, behind whose `known` routes the others were asked for; ValueError if it has none."""
        self.extend(generated.versions)
        if known is None:
            return
        if generated.routes is None:
            raise ValueError(NO_ROUTES)
        self.routes = joined([*known, generated.routes])
        self.ids = array(TOKEN, [*prompt_ids, *generated.ids])


class SeamlessClient(FullyAsyncLLMServerClient):  # type: ignore[misc]
    """Generates through the data plane, whatever a call has beside its text.

    Owned state, kept for a process since clients are sent between processes: the versions of each conversation's
    tokens, by its request id, as long as its agent loop refers to them.
    """

    conversations: ClassVar[WeakValueDictionary[str, Versions]] = WeakValueDictionary()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **extra: Any
    ) -> TokenOutput:
        """Runs one generation; `extra_fields` has the oldest and the newest weight version of its tokens."""
        ids, name = normalize_token_ids(prompt_ids), str(request_id)
        fields, group = self.sampling_fields(len(ids), sampling_params), GROUP.get(None)
        of = ("", False) if group is None else (group.uid, group.validation)
        versions = self.conversations.setdefault(name, Versions())
        replayed = self.config.actor_rollout_ref.rollout.get("enable_rollout_routing_replay") and not of[1]
        routes_from = versions.routes_from(ids) if replayed else None
        known = None if routes_from is None else versions.known(routes_from)
        call = plane_for(self.config, name).generate.remote(name, ids, fields, *of, packed_media(extra), routes_from)
        generated = await await_reply(call, cancels=True)
        versions.add(ids, generated, known)
        return output_of(generated, versions)

    def sampling_fields(self, prompt_length: int, requested: dict[str, Any]) -> dict[str, Any]:
        """vLLM's sampling fields, with the limits and defaults that verl's server would give them.

        Raises ValueError for a prompt after which the model's length leaves nothing to generate.
        """
        rollout = self.config.actor_rollout_ref.rollout
        max_length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
        if prompt_length >= max_length:
            problem = f"rollout.max_model_len={max_length} leaves nothing to generate"
            raise ValueError(f"prompt of {prompt_length} tokens: {problem}")
        limits = [requested[name] for name in LIMITS if requested.get(name) is not None] or [rollout.response_length]
        fields = {name: value for name, value in requested.items() if name not in (*LIMITS, "logprobs")}
        fields.setdefault("ignore_eos", rollout.get("ignore_eos", False))
        return fields | {"max_tokens": max(1, min(limits[0], max_length - prompt_length))}


def packed_media(extra: dict[str, Any]) -> bytes:
    """What a call has beside its text, as an engine's request has it; `extra` are arguments of verl's client."""
    if unknown := extra.keys() - {*MEDIA, *UNUSED, "mm_processor_kwargs"}:
        raise TypeError(f"generate() takes no {', '.join(sorted(unknown))}")
    data = {MEDIA[name]: value for name, value in extra.items() if name in MEDIA and is_set(value)}
    if not data:
        return b""
    kwargs = extra.get("mm_processor_kwargs")
    return pickle.dumps({"multi_modal_data": data} | ({"mm_processor_kwargs": kwargs} if kwargs else {}))


def is_set(value: Any) -> bool:
    """Whether a caller gave a value; None and empty containers are no value."""
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


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
        routed_experts=None if versions.routes is None else versions.routes.array(),
    )
