"""From a finished session to rows of TransferQueue: verl's AgentLoopOutput for each training sequence, and the columns
and tags that verl's trainer and replay buffer read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from seamless_verl.data_plane.actor import FinishedSession
from seamless_verl.data_plane.client import await_reply
from seamless_verl.trajectory.sequences import CONTEXT_VERSION, TrainingSequence

GENERATED_VERSIONS = "generated_versions"
"""In `extra_fields`: the weight version of each token that was generated, in order, context left out."""


class SessionOutputs(list[AgentLoopOutput]):
    """What a session leaves, until TransferQueue has it or its group has failed; then its plane is told."""

    def __init__(self, outputs: list[AgentLoopOutput], plane: Any, session_id: str) -> None:
        super().__init__(outputs)
        self.plane, self.session_id = plane, session_id

    async def acknowledge(self, kept: bool) -> None:
        await await_reply(self.plane.acknowledge.remote(self.session_id, kept))


def outputs_of(session: FinishedSession, reward: float | None, seconds: float) -> list[AgentLoopOutput]:
    """The sequences as verl's outputs; `reward` None lets verl's reward manager score them."""
    metrics = AgentLoopMetrics(generate_sequences=seconds)
    return [output_of(one, session, reward, metrics) for one in session.sequences]


def output_of(
    one: TrainingSequence, session: FinishedSession, reward: float | None, metrics: AgentLoopMetrics
) -> AgentLoopOutput:
    versions = one.weight_version[one.weight_version != CONTEXT_VERSION]
    return AgentLoopOutput(
        prompt_ids=one.prompt_ids.tolist(),
        response_ids=one.response_ids.tolist(),
        response_mask=one.response_mask.tolist(),
        response_logprobs=one.rollout_log_probs.tolist(),
        reward_score=reward,
        num_turns=2 * session.turns,  # verl counts messages
        metrics=metrics,
        extra_fields={
            "min_global_steps": int(versions.min()),
            "max_global_steps": int(versions.max()),
            "weight_version": one.weight_version.tolist(),
            "turn_scores": [],
            "tool_rewards": [],
            "reward_extra_info": {},
        },
    )


class VersionedOutput(AgentLoopOutput):  # type: ignore[misc]
    """verl's output with one more column: `weight_version`, int64 [response], -1 where nothing was generated.

    Our sessions leave it in `extra_fields`, and our client the versions of all that a conversation generated. What
    a loop drops of that counts as of the oldest version it knows.
    """

    def as_dict(self) -> dict[str, Any]:
        columns: dict[str, Any] = super().as_dict()
        columns["weight_version"] = torch.tensor(versions_of(self), dtype=torch.int64)
        return columns

    @classmethod
    def of(cls, output: AgentLoopOutput) -> VersionedOutput:
        return cls.model_construct(_fields_set=set(output.model_fields_set), **dict(output))


def versions_of(output: AgentLoopOutput) -> list[int]:
    if (column := output.extra_fields.get("weight_version")) is not None:
        return [int(version) for version in column]
    oldest = output.extra_fields.get("min_global_steps")
    known = iter(output.extra_fields.get(GENERATED_VERSIONS) or ())
    unknown = CONTEXT_VERSION if oldest is None else oldest
    return [int(next(known, unknown)) if generated else int(CONTEXT_VERSION) for generated in output.response_mask]


class Row(NamedTuple):
    """One training sequence; `columns` are tensors, or anything that pickles."""

    key: str
    columns: dict[str, Any]
    tag: dict[str, Any]


class Positions(Protocol):
    """What verl's worker knows of its model: `ids` and the mask have shape [1, length]."""

    def _compute_multi_modal_inputs(self, output: AgentLoopOutput, ids: torch.Tensor) -> Mapping[str, Any]: ...
    def _compute_position_ids(
        self, ids: torch.Tensor, mask: torch.Tensor, inputs: Mapping[str, Any]
    ) -> torch.Tensor: ...


def share_reward(outputs: Sequence[AgentLoopOutput]) -> None:
    """The score of a session, which its last output has, is that of all."""
    *earlier, last = outputs
    if last.reward_score is not None:
        for output in earlier:
            output.reward_score = last.reward_score
            output.extra_fields["reward_extra_info"] = last.extra_fields["reward_extra_info"]


def rows_of(outputs: Sequence[AgentLoopOutput], worker: Positions, sample: Mapping[str, Any]) -> list[Row]:
    """One row for each; `sample` is the prompt's columns, of which `uid` and `session_id` make the keys."""
    return [
        Row(f"{sample['uid']}_{sample['session_id']}_{i}", *_columns_and_tag(output, worker, sample))
        for i, output in enumerate(outputs)
    ]


def _columns_and_tag(
    output: AgentLoopOutput, worker: Positions, sample: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    columns = VersionedOutput.of(output).as_dict() | dict(sample)
    columns.pop("multi_modal_data", None)  # raw pictures, of which `multi_modal_inputs` has what the model takes
    ids = torch.cat([columns["prompts"], columns["responses"]])
    inputs = worker._compute_multi_modal_inputs(output, ids)
    columns["input_ids"], columns["multi_modal_inputs"] = ids, inputs
    columns["position_ids"] = worker._compute_position_ids(ids[None], torch.ones_like(ids)[None], inputs).squeeze(0)
    columns["loss_mask"] = columns["response_mask"]
    return columns, _tag(columns)


def _tag(columns: Mapping[str, Any]) -> dict[str, Any]:
    """What the replay buffer and the batch's balance ask, without reading the columns."""
    prompt, response, extra = len(columns["prompts"]), len(columns["responses"]), columns["extra_fields"]
    lengths = {"prompt_len": prompt, "response_len": response, "seq_len": prompt + response}
    versions = {name: extra.get(name) for name in ("min_global_steps", "max_global_steps")}
    return {"status": "success", **lengths, "global_steps": columns["global_steps"], **versions}
