"""Computes the advantages of a batch, by verl's estimators or this package's, and describes them for the journal.

This package's estimators compare sessions: they get one row of each, whatever `seamless.tokens.weigh` says of the loss,
and their result goes to all rows of the session. One that compares turns gets all rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
import transfer_queue as tq
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1 import trainer_base

from seamless_verl import algorithms
from seamless_verl.agent_loops.row_keys import parts_of
from seamless_verl.agent_loops.rows import TURN_COLUMNS
from seamless_verl.algorithms.estimate import NO_TURNS, Estimate, RowTurns, Turns, this_estimate
from seamless_verl.platform.adaptation import rebound
from seamless_verl.trainer.session_weight import (
    advantage_by_session,
    outcome_rows,
    put_advantages,
    put_row_weights,
    rows_of_sessions,
)
from seamless_verl.trainer.token_mask import mask_rows, own_keys, trained_tokens
from seamless_verl.trajectory.account import DropReason

algorithms.register(algorithms.ESTIMATORS)
FIELDS = ["advantages", "response_mask"]
CORRECTION = "compute_rollout_correction_and_add_to_batch"
Compute = Callable[[Any, dict[str, Any]], Any]


@dataclass(eq=False)
class Advantages:
    """Computes those of a run."""

    estimator: str  # `algorithm.adv_estimator`
    _: KW_ONLY
    by_session: bool  # a session weighs once, however many rows it has
    rejects: bool  # verl's computation masks tokens, too
    details: dict[str, dict[str, Any]] | None  # by prompt, what the journal is to know; None without a journal
    count_masked: Callable[[int, DropReason], None]  # told of tokens that are left out of training

    def compute(self, batch: Any, metrics: dict[str, Any], by_verl: Compute, *, trains: bool = True) -> Any:
        """The batch with its advantages in TransferQueue; `by_verl` is verl's computation.

        Where the batch `trains` nothing they are zeros: verl's correction, and estimators that whiten, need a token.
        """
        if not trains:
            instead = {CORRECTION: uncorrected, "compute_advantage_for_multi_trajectories": zeros}
            with rebound(trainer_base, **instead):
                batch = by_verl(batch, metrics)
            return put_row_weights(batch) if self.by_session else batch
        by_verl = partial(self._counting, by_verl) if self.rejects else by_verl
        if self.estimator in algorithms.ESTIMATORS:
            batch = self._own(batch, metrics, by_verl)
        elif self.by_session:
            padding = frozenset(batch.keys) - frozenset(own_keys(batch))
            by_session = partial(advantage_by_session, padding=padding)
            with rebound(trainer_base, compute_advantage_for_multi_trajectories=by_session):
                batch = by_verl(batch, metrics)
        else:
            batch = by_verl(batch, metrics)
        if self.details is not None:
            for uid, advantages in advantages_of(batch).items():
                self.details[uid]["advantages"] = advantages
        return put_row_weights(batch) if self.by_session else batch

    def _counting(self, by_verl: Compute, batch: Any, metrics: dict[str, Any]) -> Any:
        before = trained_tokens(batch)
        batch = by_verl(batch, metrics)
        self.count_masked(before - trained_tokens(batch), DropReason.REJECTED)
        return batch

    def _own(self, batch: Any, metrics: dict[str, Any], by_verl: Compute) -> Any:
        """By an estimator of this package; masks the rows that it leaves out of training."""
        estimate = OwnEstimate(read_turns(batch) if self.estimator in algorithms.OF_TURNS else None)
        with rebound(trainer_base, compute_advantage_for_multi_trajectories=estimate):
            batch = by_verl(batch, metrics)
        metrics.update(estimate.metrics)
        if estimate.untrained:
            masked = mask_rows(batch, estimate.untrained)
            for uid, session, _ in (parts_of(key) for key in estimate.untrained):
                if self.details is not None:
                    self.details[uid]["pivot"] = session
            self.count_masked(masked, DropReason.PIVOT)
        return batch


def uncorrected(data: Any, config: Any) -> tuple[Any, dict[str, float]]:
    return data, {}


def zeros(data: Any, batch_keys: Sequence[str], **arguments: Any) -> Any:
    data.batch["advantages"] = data.batch["returns"] = torch.zeros_like(data.batch["token_level_rewards"])
    return data


class OwnEstimate:
    """Stands for verl's `compute_advantage_for_multi_trajectories` in one call, and keeps what the estimator reports.

    After the call, `untrained` are the keys of rows with tokens to train that are left out of training.
    """

    def __init__(self, turns: Mapping[str, RowTurns] | None = None) -> None:
        self.turns = turns
        self.untrained: list[str] = []
        self.metrics: dict[str, float] = {}

    def __call__(self, data: Any, batch_keys: Sequence[str], adv_estimator: str, **arguments: Any) -> Any:
        sessions, mask = rows_of_sessions(batch_keys), data.batch["response_mask"]
        estimate = Estimate(mean_log_probs(data.batch["old_log_probs"], mask, sessions))
        of_session = outcome_rows(batch_keys, mask, sessions)
        if self.turns is not None:
            turns = [self.turns.get(key, NO_TURNS) for key in batch_keys]
            estimate.turns = Turns(turns, sessions, of_session)
        with this_estimate.during(estimate):
            compared = data if self.turns is not None else data.select_idxs(of_session)
            outcome = compute_advantage(compared, adv_estimator=adv_estimator, **arguments)
        self.metrics = estimate.metrics
        if self.turns is not None:
            return outcome
        rows = (row for number in estimate.untrained for row in sessions[number])
        self.untrained = [batch_keys[row] for row in rows if mask[row].any()]
        return put_advantages(data, sessions, outcome)


def read_turns(batch: Any) -> dict[str, RowTurns]:
    """The turns of a batch's rows by key; verl's padding, whose columns of ours are another row's, has none."""
    keys = own_keys(batch)
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(TURN_COLUMNS))
    columns = (data[name].unbind() for name in TURN_COLUMNS)
    return {key: RowTurns(*row) for key, *row in zip(keys, *columns, strict=True)}


def mean_log_probs(log_probs: torch.Tensor, mask: torch.Tensor, sessions: Sequence[Sequence[int]]) -> torch.Tensor:
    """The mean over the trained tokens of each session, float [sessions]; NaN where it has none.

    `log_probs` and `mask` are [rows, response]; `sessions` has the rows of each.
    """
    trained = mask.bool()
    sums = torch.where(trained, log_probs, torch.zeros_like(log_probs)).sum(dim=-1)
    tokens = trained.sum(dim=-1)
    return torch.stack([sums[list(rows)].sum() / tokens[list(rows)].sum() for rows in sessions])


def advantages_of(batch: Any) -> dict[str, dict[str, list[float]]]:
    """By prompt and the number of its session, as text: mean, least and greatest advantage of its trained tokens."""
    if not (keys := own_keys(batch)):
        return {}
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=FIELDS)
    return in_brief(zip(keys, *(data[field].unbind() for field in FIELDS), strict=True))


def in_brief(rows: Iterable[tuple[str, torch.Tensor, torch.Tensor]]) -> dict[str, dict[str, list[float]]]:
    """Of rows `<uid>_<session>_<sequence>`: advantages float [R], mask [R]; a session without any is left out."""
    columns: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
    for key, advantages, mask in rows:
        uid, session, _ = parts_of(key)
        if len(trained := advantages[mask.bool()]):
            columns[uid, session].append(trained.double())
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for (uid, session), parts in columns.items():
        column = torch.cat(parts)
        found[uid][session] = [round(float(value), 6) for value in (column.mean(), column.min(), column.max())]
    return dict(found)
