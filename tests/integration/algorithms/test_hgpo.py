"""HGPO: on numbers that are worked out by hand, and what holds for any sessions of a prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.integration
MANY = settings(max_examples=80, deadline=None, database=None, derandomize=True)  # the first one imports torch
STEPS = st.lists(st.tuples(st.integers(0, 2), st.integers(-8, 8).map(float)), min_size=1, max_size=4)
SESSIONS = st.lists(STEPS, min_size=1, max_size=5)
Session = Sequence[tuple[int, float]]  # the observation and the return of each step
ROOT_1_5 = math.sqrt(1.5)  # 2 in deviations of 4, 0 and 2


def advantages(sessions: Sequence[Session], depth: int = 1) -> list[list[float]]:
    from seamless_verl.algorithms.hgpo import Steps, step_advantages

    steps = [Steps(tuple(seen for seen, _ in session), tuple(value for _, value in session)) for session in sessions]
    return [found.tolist() for found in step_advantages(steps, depth)]


def flat(sessions: Sequence[Sequence[float]]) -> list[float]:
    return [value for session in sessions for value in session]


@pytest.mark.parametrize(
    ("rewards", "discount", "by_hand"),
    [
        pytest.param([0, 0, 8], 0.5, [2, 4, 8], id="the session's reward at the last turn"),
        pytest.param([1, 2, 8], 0.5, [4, 6, 8], id="turns with rewards of their own"),
        pytest.param([1, 2, 8], 0, [1, 2, 8], id="no discount of what is next: a turn's own"),
        pytest.param([1, 2, 8], 1, [11, 10, 8], id="all that follows"),
        pytest.param([], 0.5, [], id="no turn"),
    ],
)
def test_a_return_is_the_steps_own_reward_and_what_follows(
    rewards: list[float], discount: float, by_hand: list[float]
) -> None:
    from seamless_verl.algorithms.hgpo import discounted_returns

    assert list(discounted_returns(rewards, discount)) == by_hand


@pytest.mark.parametrize(
    ("sessions", "depth", "by_hand"),
    [
        # of observation 1 the returns 2, 0, 4 and 1; of 2 after anything 4, 0 and 2; of 2 after 1 4 and 0: +1, -1
        pytest.param(
            [[(1, 2.0), (2, 4.0)], [(1, 0.0), (2, 0.0)], [(5, 1.0), (2, 2.0)]],
            1,
            [[1, (ROOT_1_5 + 2 * 1) / 3], [-1, (-ROOT_1_5 - 2 * 1) / 3], [0, 0]],
            id="the group with more history weighs more",
        ),
        pytest.param(
            [[(1, 2.0), (2, 4.0)], [(1, 0.0), (2, 0.0)], [(5, 1.0), (2, 2.0)]],
            0,
            [[1, ROOT_1_5], [-1, -ROOT_1_5], [0, 0]],
            id="without history",
        ),
        # of 2 after anything 4, 0 and 8: 4 is their mean, so only the 1 of (1, 2) counts for it
        pytest.param(
            [[(1, 2.0), (2, 4.0)], [(1, 0.0), (2, 0.0)], [(5, 1.0), (2, 8.0)]],
            1,
            [[1, 1], [-1, (-ROOT_1_5 - 2 * 1) / 3], [0, ROOT_1_5]],
            id="what is 0 has no weight",
        ),
        pytest.param([[(1, 1.0), (1, 3.0)]], 1, [[-1, 1]], id="a session that comes back to what it saw"),
        pytest.param([[(1, 1.0)], [(1, 0.0)]], 2, [[1], [-1]], id="one step a session is GRPO"),
    ],
)
def test_advantages_by_hand(sessions: list[Session], depth: int, by_hand: list[list[float]]) -> None:
    found = advantages(sessions, depth)
    assert flat(found) == pytest.approx(flat(by_hand), abs=1e-5)
    assert list(map(len, found)) == list(map(len, by_hand))


@MANY
@given(SESSIONS, st.randoms(use_true_random=False))
def test_the_order_of_sessions_changes_nothing(sessions: list[Session], random: Any) -> None:
    order = list(range(len(sessions)))
    random.shuffle(order)
    found, shuffled = advantages(sessions), advantages([sessions[i] for i in order])
    for place, i in enumerate(order):
        assert shuffled[place] == pytest.approx(found[i], abs=1e-9)


@MANY
@given(SESSIONS, st.integers(-50, 50), st.integers(1, 6))
def test_a_shift_and_a_scale_of_all_returns_change_nothing(sessions: list[Session], shift: int, scale: int) -> None:
    moved = [[(seen, value * scale + shift) for seen, value in session] for session in sessions]
    assert flat(advantages(moved)) == pytest.approx(flat(advantages(sessions)), abs=1e-4)


@MANY
@given(SESSIONS, st.floats(-1e6, 1e6))
def test_equal_returns_have_no_advantage(sessions: list[Session], value: float) -> None:
    assert not any(flat(advantages([[(seen, value) for seen, _ in session] for session in sessions])))


@MANY
@given(SESSIONS)
def test_advantages_are_finite_and_those_of_lone_steps_0(sessions: list[Session]) -> None:
    found = advantages(sessions)
    assert all(map(math.isfinite, flat(found)))
    seen = [step for session in sessions for step, _ in session]
    lone = [
        value
        for session, values in zip(sessions, found, strict=True)
        for (step, _), value in zip(session, values, strict=True)
        if seen.count(step) == 1
    ]
    assert not any(lone)


def test_the_estimator_gives_each_turn_of_each_row_its_own() -> None:
    """The last turn of session 0 is split over its rows, and its last token is masked; padding has no turn. With the
    discount 0.5 the returns of session 0 are 1.25 + 0.5 x 4 and 4, those of session 1 are -10 + 0.5 x 5 and 5."""
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from seamless_verl.algorithms.estimate import NO_TURNS, Estimate, RowTurns, Turns, this_estimate

    def row(turn: list[int], observation: list[int], reward: list[float]) -> RowTurns:
        return RowTurns(torch.tensor(turn), torch.tensor(observation), torch.tensor(reward))

    rows = [
        row([0, -1, 3], [7, 0, 9], [1.25, 0, 0]),
        row([3, 3], [9, 9], [0, 0]),
        row([1, -1, -1, 2], [7, 0, 0, 9], [-10, 0, 0, 0]),
        NO_TURNS,
    ]
    turns = Turns(rows, [[0, 1], [2], [3]], [1, 2, 3], 0, 0.5)
    mask = torch.tensor([[1, 0, 1, 0], [1, 0, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0]])
    rewards = torch.zeros(4, 4)
    rewards[0, 2] = rewards[1, 1] = 4.0  # one reward, which both rows of the session have
    rewards[2, 3] = 5.0
    estimate = Estimate(torch.zeros(3), turns)
    with this_estimate.during(estimate):
        found, returns = get_adv_estimator_fn("hgpo")(
            token_level_rewards=rewards, response_mask=mask, index=np.array(["u", "u", "u", "pad"], dtype=object)
        )
    expected = [[1.0, 0, -1, 0], [-1, 0, 0, 0], [-1, 0, 0, 1], [0, 0, 0, 0]]
    assert torch.allclose(found, torch.tensor(expected), atol=1e-5) and torch.equal(found, returns)
    assert estimate.metrics == {"seamless/hgpo/compared": 1.0} and estimate.untrained == []


def test_steps_of_other_prompts_are_not_compared() -> None:
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from seamless_verl.algorithms.estimate import Estimate, RowTurns, Turns, this_estimate

    one = RowTurns(torch.tensor([0]), torch.tensor([7]), torch.tensor([0.0]))
    estimate = Estimate(torch.zeros(2), Turns([one, one], [[0], [1]], [0, 1], 2, 0.95))
    with this_estimate.during(estimate):
        found, _ = get_adv_estimator_fn("hgpo")(
            token_level_rewards=torch.tensor([[1.0], [0.0]]),
            response_mask=torch.ones(2, 1),
            index=np.array(["u", "v"], dtype=object),
        )
    assert not found.any() and estimate.metrics == {"seamless/hgpo/compared": 0.0}
