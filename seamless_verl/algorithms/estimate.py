"""What verl's advantage estimators are not given, and what they may report: one call of an estimator of this package.

verl calls a registered estimator with rewards, masks and groups, and takes advantages. The trainer gives the rest
around that call, in the one thread that computes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch


@dataclass
class Estimate:
    """One call, of one row for each session.

    `mean_log_probs` is float [rows]: the mean of PPO's old logprobs over all trained tokens of the session, NaN where
    it has none. The estimator adds to `untrained` the rows that are left out of training, and to `metrics`.
    """

    mean_log_probs: torch.Tensor
    untrained: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


_estimate: ContextVar[Estimate | None] = ContextVar("estimate", default=None)


@contextmanager
def during(estimate: Estimate) -> Iterator[None]:
    """In the block, estimators find `estimate`."""
    token = _estimate.set(estimate)
    try:
        yield
    finally:
        _estimate.reset(token)


def this_estimate() -> Estimate:
    """Of the call that runs. Settings that would lead here in another trainer mode are refused before the run."""
    estimate = _estimate.get()
    if estimate is None:
        raise RuntimeError("this advantage estimator compares sessions: only trainer mode seamless tells them apart")
    return estimate


def rewards_of_rows(token_level_rewards: torch.Tensor) -> torch.Tensor:
    """Each row's reward, float [rows]: the sum of its tokens', [rows, response].

    Raises:
        ValueError: one is not finite.
    """
    rewards = token_level_rewards.sum(dim=-1)
    if not bool(rewards.isfinite().all()):
        bad = rewards[~rewards.isfinite()][0].item()
        raise ValueError(
            f"reward={bad}: cannot be compared with others. Let the reward function return a finite number"
        )
    return rewards


def groups_of(index: Iterable[object]) -> list[list[int]]:
    """The rows of each group, by the groups' names in `index`; groups and rows keep their order."""
    groups = defaultdict[object, list[int]](list)
    for row, name in enumerate(index):
        groups[name].append(row)
    return list(groups.values())
