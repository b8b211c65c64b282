"""Calls the advantage estimators of this package in the place where verl's trainer calls its own.

They compare sessions. So they get one row of each, whatever `seamless.tokens.weigh` says of the loss, and their result
goes to all rows of the session. One that compares turns gets all rows, and says for each what its tokens get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transfer_queue as tq
from verl.trainer.ppo.ray_trainer import compute_advantage

from seamless_verl.agent_loops.rows import TURN_COLUMNS
from seamless_verl.algorithms import hgpo, median, novelty
from seamless_verl.algorithms.estimate import NO_TURNS, Estimate, RowTurns, Turns, during
from seamless_verl.trainer.session_weight import outcome_rows, put_advantages, rows_of_sessions
from seamless_verl.trainer.token_mask import own_keys

REGISTERED = (hgpo, median, novelty)
"""Imported in the trainer's process, for with that they register their estimators in verl."""


class OwnEstimate:
    """Stands for verl's `compute_advantage_for_multi_trajectories` in one call, and keeps what the estimator reports.

    After the call, `untrained` are the keys of the rows with tokens to train that are left out of training. `turns` are
    by the rows' keys, for an estimator that compares turns, with `depth` earlier observations.
    """

    def __init__(self, turns: Mapping[str, RowTurns] | None = None, depth: int = 2) -> None:
        self.turns, self.depth = turns, depth
        self.untrained: list[str] = []
        self.metrics: dict[str, float] = {}

    def __call__(self, data: Any, batch_keys: Sequence[str], adv_estimator: str, **arguments: Any) -> Any:
        sessions, mask = rows_of_sessions(batch_keys), data.batch["response_mask"]
        estimate = Estimate(mean_log_probs(data.batch["old_log_probs"], mask, sessions))
        of_session = outcome_rows(batch_keys, mask, sessions)
        if self.turns is not None:
            rows = [self.turns.get(key, NO_TURNS) for key in batch_keys]
            estimate.turns = Turns(rows, sessions, of_session, self.depth)
            return self._of_turns(estimate, data, adv_estimator, arguments)
        with during(estimate):
            outcome = compute_advantage(data.select_idxs(of_session), adv_estimator=adv_estimator, **arguments)
        rows = (row for number in estimate.untrained for row in sessions[number])
        self.untrained = [batch_keys[row] for row in rows if mask[row].any()]
        self.metrics = estimate.metrics
        return put_advantages(data, sessions, outcome)

    def _of_turns(self, estimate: Estimate, data: Any, adv_estimator: str, arguments: Mapping[str, Any]) -> Any:
        with during(estimate):
            data = compute_advantage(data, adv_estimator=adv_estimator, **arguments)
        self.metrics = estimate.metrics
        return data


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
