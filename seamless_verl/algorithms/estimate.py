"""What verl's advantage estimators are not given, and what they may report: one call of one of this package's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from seamless_verl.algorithms import Given


@dataclass(frozen=True, eq=False)
class RowTurns:
    """One row's turns, by token: `turn` int64 [response], the turn's place in its session, -1 for context;
    `observation` int64, the hash of what the turn answered; `reward` float, what the turn itself was given.
    """

    turn: torch.Tensor
    observation: torch.Tensor
    reward: torch.Tensor


NO_TURNS = RowTurns(*(torch.zeros(0, dtype=dtype) for dtype in (torch.int64, torch.int64, torch.float32)))
"""Of a row that generated nothing."""


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns of all rows of a batch, and how they are compared.

    `sessions` has the rows of each session, `outcome_rows` the one row of each that has its reward. `depth` is the
    number of earlier observations that are compared, `discount` that of a return.
    """

    rows: Sequence[RowTurns]
    sessions: Sequence[Sequence[int]]
    outcome_rows: Sequence[int]
    depth: int = 2  # K
    discount: float = 0.95

    def of_session(self, session: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The turns with tokens in the session's rows, in order: their places, observations int64 and rewards float64.

        They are new tensors, [turns] each.
        """
        rows = [self.rows[row] for row in self.sessions[session]]
        turn = torch.cat([row.turn for row in rows])
        places, which = torch.unique(turn[turn >= 0], return_inverse=True)
        columns = torch.cat([row.observation for row in rows]), torch.cat([row.reward for row in rows]).double()
        observations, rewards = (
            torch.zeros(len(places), dtype=column.dtype).index_copy_(0, which, column[turn >= 0]) for column in columns
        )
        return places, observations, rewards


@dataclass
class Estimate:
    """One call, of one row for each session; where there are `turns`, of all rows.

    `mean_log_probs` is float [sessions]: the mean of PPO's old logprobs over all trained tokens of the session, NaN
    where it has none. The estimator adds to `untrained` the rows that are left out of training, and to `metrics`.
    """

    mean_log_probs: torch.Tensor
    turns: Turns | None = None
    untrained: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


this_estimate = Given[Estimate](
    "this advantage estimator compares sessions: only trainer mode seamless tells them apart"
)


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
