"""A session's outputs as rows of TransferQueue: the columns and tags that verl's trainer and replay buffer read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from seamless_verl.trainer.data_plane.samples import VersionedOutput


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
