"""Turns finished sessions into rows of TransferQueue, with the columns and tags that verl's trainer and buffer read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from seamless_verl.agent_loops.row_keys import row_key
from seamless_verl.data_plane.client import await_reply
from seamless_verl.data_plane.finished_sessions import FinishedSession, HandedNote
from seamless_verl.runtime.pictures import picture_of
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.sequences import CONTEXT_VERSION, TrainingSequence
from seamless_verl.trajectory.turns import TurnNote

STORED = "success"  # verl's mark of a row that is whole
NO_TURN = -1
TURN_COLUMNS = ("turn", "observation", "turn_reward")
GENERATED_VERSIONS = "generated_versions"
"""In `extra_fields`: the weight version of each token that was generated, in order, context left out."""

SAMPLES, GREEDY_UNLESS = "__rollout_n__", "__do_sample__"
"""A prompt's columns, as verl has them: how many sessions it gets, and whether these are sampled."""
OLD_LOGPROBS = "has_old_log_probs"
"""A row's tag: verl's column `old_log_probs` is written with it. verl's padding has the tag and the column of another
row."""
FIRST, PROMPT = "__first_session__", "__sampler_prompt__"
"""A prompt's columns: the number of its first session, where others ended before; what a sampler knows it by."""


class SessionOutputs(list[AgentLoopOutput]):
    """A session's outputs; its data plane gets an acknowledgement when they are stored, or their group has failed."""

    def __init__(
        self, outputs: list[AgentLoopOutput], plane: Any, session_id: str, failure: str | None = None, error: str = ""
    ) -> None:
        """`failure` is how its agent failed, if its session has the reward of a failure; `error` says why."""
        super().__init__(outputs)
        self.plane, self.session_id, self.failure, self.error = plane, session_id, failure, error
        self.scored: tuple[float, float] | None = None

    def note(self, uid: str, reason: str, *, validation: bool, dropped: DropReason = DropReason.SESSION) -> HandedNote:
        """What the journal keeps: the reason of a drop or a failure, and the rewards that all rows have."""
        reason = reason or (f"its agent failed: {self.failure}" if self.failure else "")
        return HandedNote(uid, reason, rewards_of(self[-1]) if self else {}, validation, dropped, self.scored)

    async def acknowledge(self, kept: bool, note: HandedNote) -> None:
        await await_reply(self.plane.acknowledge.remote(self.session_id, kept, note))


def rewards_of(output: AgentLoopOutput) -> dict[str, float]:
    """The score of a session, and the numbers that its reward function returned beside it."""
    extra = output.extra_fields.get("reward_extra_info") or {}
    rewards = {str(name): float(value) for name, value in extra.items() if isinstance(value, int | float)}
    return rewards if output.reward_score is None else rewards | {"reward": float(output.reward_score)}


def outputs_of(
    session: FinishedSession, reward: float | None, seconds: float, *, of_turns: bool = False
) -> list[AgentLoopOutput]:
    """The sequences as verl's outputs; `reward` None lets verl's reward manager score them. `of_turns`: with the turn
    of each token, for an advantage estimator that compares turns."""
    metrics = AgentLoopMetrics(generate_sequences=seconds)
    outputs = [output_of(sequence, session, reward, metrics) for sequence in session.sequences]
    if of_turns:
        for output, sequence in zip(outputs, session.sequences, strict=True):
            output.extra_fields |= turn_columns(sequence, session.trained_turns)
    return outputs


def output_of(
    sequence: TrainingSequence, session: FinishedSession, reward: float | None, metrics: AgentLoopMetrics
) -> AgentLoopOutput:
    versions = sequence.weight_version[sequence.weight_version != CONTEXT_VERSION]
    pictures = [picture_of(session.images[digest]) for digest in sequence.images]
    return AgentLoopOutput(
        prompt_ids=sequence.prompt_ids.tolist(),
        response_ids=sequence.response_ids.tolist(),
        response_mask=sequence.response_mask.tolist(),
        response_logprobs=sequence.rollout_log_probs.tolist(),
        reward_score=reward,
        routed_experts=sequence.routes,
        num_turns=2 * session.turns,  # verl counts messages
        multi_modal_data={"images": pictures} if pictures else None,
        metrics=metrics,
        extra_fields={
            "min_global_steps": int(versions.min()),
            "max_global_steps": int(versions.max()),
            "weight_version": sequence.weight_version.tolist(),
            "grammar": sequence.grammar.tolist(),
            "turn_scores": [],
            "tool_rewards": [],
            "reward_extra_info": {},
        },
    )


def turn_columns(sequence: TrainingSequence, turns: Mapping[str, TurnNote]) -> dict[str, list[Any]]:
    """For each token of the response its turn's place in the session, -1 for context, its observation and reward."""
    size = len(sequence.response_ids)
    turn, observation, reward = [NO_TURN] * size, [0] * size, [0.0] * size
    for span in sequence.spans:
        note, length = turns[span.turn_id], span.stop - span.start
        turn[span.start : span.stop] = [note.place] * length
        observation[span.start : span.stop] = [note.observation] * length
        reward[span.start : span.stop] = [note.reward] * length
    return dict(zip(TURN_COLUMNS, (turn, observation, reward), strict=True))


def versions_of(output: AgentLoopOutput) -> list[int]:
    """The weight version of each token of the response, -1 where nothing was generated.

    `extra_fields` has the column for our sessions, and the versions of all tokens of a conversation for our client. A
    generated token without a recorded version gets the oldest version of its conversation.
    """
    if (column := output.extra_fields.get("weight_version")) is not None:
        return [int(version) for version in column]
    oldest = output.extra_fields.get("min_global_steps")
    recorded = iter(output.extra_fields.get(GENERATED_VERSIONS) or ())
    default = CONTEXT_VERSION if oldest is None else oldest
    return [int(next(recorded, default)) if generated else int(CONTEXT_VERSION) for generated in output.response_mask]


class Row(NamedTuple):
    """One training sequence; `columns` are tensors, or anything that pickles."""

    key: str
    columns: dict[str, Any]
    tag: dict[str, Any]


def turns_of(output: AgentLoopOutput) -> dict[str, torch.Tensor]:
    """For each token of the response, [response]: int64 `turn`, the place of its turn in the session, -1 where nothing
    was generated; int64 `observation`, the hash of what that turn answered; float32 `turn_reward`, what it was given.

    A conversation of verl's own agent loops is one turn.
    """
    one = [0 if generated else NO_TURN for generated in output.response_mask]
    none = [0] * len(one)
    dtypes = (torch.int64, torch.int64, torch.float32)
    return {
        name: torch.tensor(output.extra_fields.get(name) or default, dtype=dtype)
        for name, default, dtype in zip(TURN_COLUMNS, (one, none, none), dtypes, strict=True)
    }


def share_reward(outputs: Sequence[AgentLoopOutput]) -> None:
    """Gives all outputs of a session its score, which the last one has."""
    *earlier, last = outputs
    if last.reward_score is not None:
        for output in earlier:
            output.reward_score = last.reward_score
            output.extra_fields["reward_extra_info"] = last.extra_fields["reward_extra_info"]


def rows_of(outputs: Sequence[AgentLoopOutput], worker: Any, sample: Mapping[str, Any]) -> list[Row]:
    """One row for each output; `sample` has the prompt's columns, whose `uid` and `session_id` form the key.

    `worker` is verl's: inputs depend on its model, and columns on whether its estimator `compares_turns`.
    """
    return [
        Row(row_key(sample["uid"], sample["session_id"], i), *_columns_and_tag(output, worker, sample))
        for i, output in enumerate(outputs)
    ]


def with_old_logprobs(row: Row) -> Row:
    """The row for a run that trains on the logprobs which engines gave (verl's `bypass_mode`)."""
    if (logprobs := row.columns.get("rollout_log_probs")) is None:
        return row
    return row._replace(columns=row.columns | {"old_log_probs": logprobs}, tag=row.tag | {OLD_LOGPROBS: True})


def has_old_logprobs(tag: Mapping[str, Any]) -> bool:
    """Whether a row was written with its own, by its tag."""
    return bool(tag.get(OLD_LOGPROBS)) and not tag.get("is_padding")


def labelled(rows: list[Row], prompt: str, reward: float | None) -> list[Row]:
    """The rows of a session with its prompt and reward in their tags, for a sampler; without a prompt as they are."""
    label = {"prompt": prompt, "reward": reward}
    return [row._replace(tag=row.tag | label) for row in rows] if prompt else rows


def _columns_and_tag(
    output: AgentLoopOutput, worker: Any, sample: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """verl's columns with two more, int64 [response]: `weight_version`, and `grammar`, a `Grammar` for each token."""
    columns = dict(sample) | output.as_dict()
    columns["weight_version"] = torch.tensor(versions_of(output), dtype=torch.int64)
    # tokens of verl's own agent loops have no labels of grammars
    labels = output.extra_fields.get("grammar") or [0] * len(output.response_ids)
    columns["grammar"] = torch.tensor(labels, dtype=torch.int64)
    if worker.compares_turns:
        columns |= turns_of(output)
    columns.pop("multi_modal_data", None)  # raw images; the model takes `multi_modal_inputs`
    ids = torch.cat([columns["prompts"], columns["responses"]])
    inputs = worker._compute_multi_modal_inputs(output, ids)
    columns["input_ids"], columns["multi_modal_inputs"] = ids, inputs
    columns["position_ids"] = worker._compute_position_ids(ids[None], torch.ones_like(ids)[None], inputs).squeeze(0)
    columns["loss_mask"] = columns["response_mask"]
    return columns, _tag(columns)


def _tag(columns: Mapping[str, Any]) -> dict[str, Any]:
    """What the replay buffer and the balancing of batches read, without the columns."""
    prompt, response, extra = len(columns["prompts"]), len(columns["responses"]), columns["extra_fields"]
    lengths = {"prompt_len": prompt, "response_len": response, "seq_len": prompt + response}
    versions = {name: extra.get(name) for name in ("min_global_steps", "max_global_steps")}
    return {"status": STORED, **lengths, "global_steps": columns["global_steps"], **versions}
