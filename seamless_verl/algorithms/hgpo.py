"""`algorithm.adv_estimator=hgpo`: each turn of a session has an advantage of its own, from turns that saw the same.

HGPO (He et al., Hierarchy-of-Groups Policy Optimization, arXiv 2602.22817). A step is a turn of a session. Within a
prompt, the steps whose last k observations are equal form a group, for k = 1 .. K + 1, if there are two or more of
them. With R the step's return, R = own reward + discount x R of the session's next step,

    a_k = (R - mean of the group) / (population deviation of the group + 1e-6),   A = sum of w_k a_k

over the k with a_k other than 0, with w_k in proportion to k and of sum 1. The paper counts the observations before the
current one, from 0 to K, and its weight is that number + 1: the same. A step that is in no group has A = 0.

What differs from the paper and its code (langfengQ/verl-agent, recipe/hgpo):

- An observation is what `trajectory/turns.py` says: messages, of which only the hash is compared.
- The code has one sequence for each step. Here a step's tokens may be in the middle of a sequence.
- A group whose returns are equal has a_k = 0 exactly, also where rounding left a difference to their mean.
- The code's group of whole sessions (`base_group`) is left out, as in its published runs, and so are other exponents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from verl.trainer.ppo.core_algos import register_adv_est

from seamless_verl.algorithms.estimate import Turns, groups_of, rewards_of_rows, this_estimate

EPSILON = 1e-6


@dataclass(frozen=True)
class Steps:
    """One session's steps in order: the hash of each one's observation, and its return."""

    observations: tuple[int, ...]
    returns: tuple[float, ...]


def discounted_returns(rewards: Sequence[float], discount: float) -> tuple[float, ...]:
    """R of each step, from the rewards of a session's steps in order."""
    found, following = list[float](), 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        found.append(following)
    return tuple(reversed(found))


def step_advantages(sessions: Sequence[Steps], depth: int) -> list[torch.Tensor]:
    """A of each step of the sessions of one prompt, float64 [steps] for each session; `depth` is K."""
    sums = [torch.zeros(len(steps.returns), dtype=torch.float64) for steps in sessions]
    weights = [torch.zeros_like(values) for values in sums]
    for k in range(1, depth + 2):
        for members in _groups(sessions, k):
            returns = torch.tensor([sessions[number].returns[step] for number, step in members], dtype=torch.float64)
            for (number, step), value in zip(members, _normalized(returns).tolist(), strict=True):
                if value:
                    sums[number][step] += k * value
                    weights[number][step] += k
    return [values / weight.clamp(min=1.0) for values, weight in zip(sums, weights, strict=True)]


def _groups(sessions: Sequence[Steps], k: int) -> list[list[tuple[int, int]]]:
    """Two or more steps, (session, step) each, whose last k observations are equal."""
    groups = defaultdict[tuple[int, ...], list[tuple[int, int]]](list)
    for number, steps in enumerate(sessions):
        for step in range(k - 1, len(steps.observations)):
            groups[steps.observations[step + 1 - k : step + 1]].append((number, step))
    return [members for members in groups.values() if len(members) > 1]


def _normalized(returns: torch.Tensor) -> torch.Tensor:
    if bool((returns == returns[0]).all()):
        return torch.zeros_like(returns)
    return (returns - returns.mean()) / (returns.std(correction=0) + EPSILON)


@register_adv_est("hgpo")
def hgpo_advantage(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    config: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, which are the same, float [rows, response]; `index` names each row's group.

    Unlike other estimators it gets all rows of the sessions. A session's own reward is added to that of its last step.

    Raises:
        ValueError: a reward is not finite.
    """
    estimate = this_estimate()
    turns, rewards = estimate.turns, rewards_of_rows(token_level_rewards)
    assert turns is not None, "the trainer gives this estimator the turns of each row"
    by_token = torch.zeros_like(token_level_rewards)
    for group in groups_of(index[rows[0]] for rows in turns.sessions):
        steps = [_steps_of(turns, number, float(rewards[turns.outcome_rows[number]])) for number in group]
        for number, advantages in zip(group, step_advantages(steps, turns.depth), strict=True):
            _put(by_token, turns, number, advantages)
    by_token *= response_mask
    compared = by_token[response_mask.bool()] != 0
    estimate.metrics["seamless/hgpo/compared"] = float(compared.float().mean()) if len(compared) else 0.0
    return by_token, by_token


def _steps_of(turns: Turns, session: int, reward: float) -> Steps:
    """A session's steps, with its `reward` at the last; without a generated token, as in padding, it has none."""
    _, observations, rewards = turns.of_session(session)
    rewards[-1:] += reward
    return Steps(tuple(observations.tolist()), discounted_returns(rewards.tolist(), turns.discount))


def _put(by_token: torch.Tensor, turns: Turns, session: int, advantages: torch.Tensor) -> None:
    """Writes the advantage of each step of a session to its tokens."""
    places, _, _ = turns.of_session(session)
    for row in turns.sessions[session]:
        column = turns.rows[row].turn
        generated = column >= 0
        values = advantages[torch.searchsorted(places, column[generated])]
        by_token[row, : len(column)][generated] = values.to(by_token.dtype)
