"""Calls the advantage estimators of this package in the place where verl's trainer calls its own.

They compare sessions. So they get one row of each, whatever `seamless.tokens.weigh` says of the loss, and their result
goes to all rows of the session.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from verl.trainer.ppo.ray_trainer import compute_advantage

from seamless_verl.algorithms import median, novelty
from seamless_verl.algorithms.estimate import Estimate, during
from seamless_verl.trainer.session_weight import outcome_rows, put_advantages, rows_of_sessions

REGISTERED = (median, novelty)
"""Imported in the trainer's process, for with that they register their estimators in verl."""


class OwnEstimate:
    """Stands for verl's `compute_advantage_for_multi_trajectories` in one call, and keeps what the estimator reports.

    After the call, `untrained` are the keys of the rows with tokens to train that are left out of training.
    """

    def __init__(self) -> None:
        self.untrained: list[str] = []
        self.metrics: dict[str, float] = {}

    def __call__(self, data: Any, batch_keys: Sequence[str], adv_estimator: str, **arguments: Any) -> Any:
        sessions, mask = rows_of_sessions(batch_keys), data.batch["response_mask"]
        estimate = Estimate(mean_log_probs(data.batch["old_log_probs"], mask, sessions))
        with during(estimate):
            chosen = data.select_idxs(outcome_rows(batch_keys, mask, sessions))
            outcome = compute_advantage(chosen, adv_estimator=adv_estimator, **arguments)
        rows = (row for number in estimate.untrained for row in sessions[number])
        self.untrained = [batch_keys[row] for row in rows if mask[row].any()]
        self.metrics = estimate.metrics
        return put_advantages(data, sessions, outcome)


def mean_log_probs(log_probs: torch.Tensor, mask: torch.Tensor, sessions: Sequence[Sequence[int]]) -> torch.Tensor:
    """The mean over the trained tokens of each session, float [sessions]; NaN where it has none.

    `log_probs` and `mask` are [rows, response]; `sessions` has the rows of each.
    """
    trained = mask.bool()
    sums = torch.where(trained, log_probs, torch.zeros_like(log_probs)).sum(dim=-1)
    tokens = trained.sum(dim=-1)
    return torch.stack([sums[list(rows)].sum() / tokens[list(rows)].sum() for rows in sessions])
