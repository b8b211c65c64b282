"""From a finished session to what verl trains: one AgentLoopOutput for each training sequence."""

from __future__ import annotations

from typing import Any

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from seamless_verl.trainer.data_plane.answers import answered
from seamless_verl.trainer.data_plane.plane import FinishedSession
from seamless_verl.trajectory.sequences import CONTEXT, TrainingSequence

GENERATED = "generated_versions"
"""In `extra_fields`: the weight version of each token that was generated, in order, context left out."""


class SessionOutputs(list[AgentLoopOutput]):
    """What a session leaves, until TransferQueue has it or its group has failed; then its plane is told."""

    def __init__(self, outputs: list[AgentLoopOutput], plane: Any, session_id: str) -> None:
        super().__init__(outputs)
        self.plane, self.session_id = plane, session_id

    async def handed(self, kept: bool) -> None:
        await answered(self.plane.handed.remote(self.session_id, kept))


def outputs_of(session: FinishedSession, reward: float | None, seconds: float) -> list[AgentLoopOutput]:
    """The sequences as verl's outputs; `reward` None lets verl's reward manager score them."""
    metrics = AgentLoopMetrics(generate_sequences=seconds)
    return [output_of(one, session, reward, metrics) for one in session.sequences]


def output_of(
    one: TrainingSequence, session: FinishedSession, reward: float | None, metrics: AgentLoopMetrics
) -> AgentLoopOutput:
    versions = one.weight_version[one.weight_version != CONTEXT]
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
    """verl's output with one more column: `weight_version`, int64 [response], CONTEXT where nothing was generated.

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
    known = iter(output.extra_fields.get(GENERATED) or ())
    unknown = CONTEXT if oldest is None else oldest
    return [int(next(known, unknown)) if generated else int(CONTEXT) for generated in output.response_mask]
