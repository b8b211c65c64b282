"""Advantage estimators: on numbers that are worked out by hand, and what holds for any numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.integration
MANY = settings(max_examples=80, deadline=None, database=None, derandomize=True)  # the first one imports torch
WHOLE = st.lists(st.integers(-20, 20).map(float), min_size=1, max_size=9)  # rewards whose sums are exact
NUMBERS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=9)
LOG_PROBS = st.floats(-30, 0, width=32)


def median_advantages(rewards: Sequence[float]) -> list[float]:
    import torch

    from seamless_verl.algorithms import median

    found: list[float] = median.median_advantages(torch.tensor(rewards)).tolist()
    return found


def estimated(
    name: str,
    rewards: Sequence[float],
    groups: Sequence[str],
    log_probs: Sequence[float] | None = None,
    config: Any = None,
) -> tuple[list[float], Any]:
    """The registered estimator's advantages of rows with two tokens, of which the first is trained, and its report."""
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    from seamless_verl.algorithms import median, novelty
    from seamless_verl.algorithms.estimate import Estimate, this_estimate

    assert median and novelty  # their import registers them
    scores = torch.zeros(len(rewards), 2)
    scores[:, 1] = torch.tensor(rewards)
    mask = torch.tensor([[1, 0]] * len(rewards))
    estimate = Estimate(torch.tensor(log_probs if log_probs is not None else [-1.0] * len(rewards)))
    with this_estimate.during(estimate):
        advantages, returns = get_adv_estimator_fn(name)(
            token_level_rewards=scores, response_mask=mask, index=np.array(groups, dtype=object), config=config
        )
    assert torch.equal(advantages, returns) and not advantages[:, 1].any(), "what is masked has an advantage"
    return advantages[:, 0].tolist(), estimate


@pytest.mark.parametrize(
    ("rewards", "by_hand"),
    [
        # median 1, |d| = 1, 0, 1 with median 1: 1 / 1.001, times 3 sessions for the 2 that differ
        ([0.0, 1.0, 2.0], [-1.4985015, 0.0, 1.4985015]),
        # median 3, |d| = 2, 1, 0, 1, 2: 2 / 1.001 * 5 / 4, and half of it
        ([1.0, 2.0, 3.0, 4.0, 5.0], [-2.4975025, -1.2487512, 0.0, 1.2487512, 2.4975025]),
        # the formula's 1 / 0.001 * 3 / 1 = 3000: the median of |d| is 0, and the largest one takes its place
        ([0.0, 0.0, 1.0], [0.0, 0.0, 2.9970030]),
        ([1.0, 1.0, 0.0], [0.0, 0.0, -2.9970030]),
        # two of five differ: 1 / 1.001 * 5 / 2
        ([0.0, 1.0, 0.0, 1.0, 0.0], [0.0, 2.4975025, 0.0, 2.4975025, 0.0]),
        # they differ unlike: 2 / 2.001 * 5 / 2 and half of it
        ([0.0, 0.0, 0.0, 1.0, 2.0], [0.0, 0.0, 0.0, 1.2493753, 2.4987506]),
        # a median of |d| of 0.5: 0.5 / 0.501 * 2 / 2; an even group, in which all differ from the median of 0.5
        ([0.0, 1.0], [-0.9980040, 0.9980040]),
        # 0.999 / 0.002 * 3 / 2 = 749 is bounded by the size of the group; -0.001 / 0.002 * 3 / 2 is not
        ([0.0, 0.001, 1.0], [-0.75, 0.0, 3.0]),
        # 7 / 1.001 * 5 / 4 = 8.7 is bounded, too
        ([1.0, 2.0, 3.0, 4.0, 10.0], [-2.4975025, -1.2487512, 0.0, 1.2487512, 5.0]),
        ([0.5, 0.5, 0.5], [0.0, 0.0, 0.0]),
        ([7.0], [0.0]),
    ],
)
def test_the_median_by_hand(rewards: list[float], by_hand: list[float]) -> None:
    assert median_advantages(rewards) == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.parametrize(
    ("rewards", "pivot"),
    [([0.0, 1.0, 2.0], 1), ([0.0, 0.0, 1.0], 0), ([1.0, 0.0, 0.0], 1), ([0.5] * 3, 0), ([1.0], 0), ([0.0, 1.0], None)],
)
def test_the_pivot_is_the_first_session_at_the_median(rewards: list[float], pivot: int | None) -> None:
    import torch

    from seamless_verl.algorithms.median import pivot_of

    assert pivot_of(torch.tensor(rewards)) == pivot


def test_each_group_has_its_median_and_its_pivot() -> None:
    """Groups of three, of two, which has no pivot, and of one, which is not left out."""
    rewards, groups = [0.0, 5.0, 0.0, 1.0, 0.0, 3.0], ["a", "b", "a", "a", "c", "c"]
    advantages, estimate = estimated("mc_grpo", rewards, groups)
    assert advantages == pytest.approx([0.0, 0.0, 0.0, 2.9970030, -0.9993338, 0.9993338], rel=1e-4)
    assert estimate.untrained == [0]


@MANY
@given(NUMBERS)
def test_the_median_is_finite_and_bounded_by_the_group(rewards: list[float]) -> None:
    advantages = median_advantages(rewards)
    assert all(math.isfinite(value) and abs(value) <= len(rewards) for value in advantages)
    if len(set(rewards)) == 1:
        assert not any(advantages)


@MANY
@given(WHOLE, st.randoms(use_true_random=False))
def test_the_median_does_not_see_the_order(rewards: list[float], chance: Any) -> None:
    order = list(range(len(rewards)))
    chance.shuffle(order)
    before, after = median_advantages(rewards), median_advantages([rewards[i] for i in order])
    assert after == pytest.approx([before[i] for i in order])


@MANY
@given(WHOLE, st.integers(-50, 50), st.sampled_from([2.0, 8.0, 0.5]))
def test_the_median_of_shifted_and_scaled_rewards(rewards: list[float], shift: int, scale: float) -> None:
    """Whole rewards have a median of |d| of 0, or 0.5 or more: 0.001 changes it by 0.4% at most when halved."""
    before = median_advantages(rewards)
    assert median_advantages([reward + shift for reward in rewards]) == pytest.approx(before)
    assert median_advantages([reward * scale for reward in rewards]) == pytest.approx(before, rel=5e-3)
    assert median_advantages([-reward for reward in rewards]) == pytest.approx([-value for value in before])


HALF = 3**0.5 / 2  # GRPO's advantage of 1 in 0, 0, 1, 1: 0.5 over the deviation of 1 / sqrt(3)


@pytest.mark.parametrize(
    ("log_probs", "bonuses"),
    [
        # mean -2: eta = e^-1 = 0.368 would be a bonus of 1.58, of which half the advantage is left; eta = e is none
        ([-1.0, -3.0, -3.0, -1.0], [0.0, 0.0, HALF / 2, 0.0]),
        # mean -2: eta = e^-0.1 = 0.904837, a bonus of 2.5 * 0.095163
        ([-1.9, -2.0, -2.1, -2.0], [0.0, 0.0, 0.2379065, 0.0]),
        # equally probable: none
        ([-2.0, -2.0, -2.0, -2.0], [0.0] * 4),
        # the improbable ones are wrong: none
        ([-9.0, -9.0, -1.0, -1.0], [0.0] * 4),
        # one has no token to train: the others' mean is -2, and it has no bonus
        ([-1.9, -2.0, -2.1, math.nan], [0.0, 0.0, 0.2379065, 0.0]),
    ],
)
def test_the_novelty_bonus_by_hand(log_probs: list[float], bonuses: list[float]) -> None:
    plain = [-HALF, -HALF, HALF, HALF]
    found, estimate = estimated("grpo_novelty", [0.0, 0.0, 1.0, 1.0], ["u"] * 4, log_probs)
    assert found == pytest.approx([a + b for a, b in zip(plain, bonuses, strict=True)], rel=1e-4)
    assert estimate.metrics == {"seamless/novelty/bonus": pytest.approx(sum(bonuses) / 2, rel=1e-4)}
    assert estimate.untrained == []


def test_without_the_deviation_the_bonus_is_of_the_plain_difference() -> None:
    config = {"norm_adv_by_std_in_grpo": False}
    found, _ = estimated("grpo_novelty", [0.0, 1.0], ["u", "u"], [-1.0, -5.0], config)
    assert found == pytest.approx([-0.5, 0.75])


@MANY
@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0]), LOG_PROBS), min_size=1, max_size=8), st.floats(-5, 5))
def test_the_bonus_is_between_none_and_half_and_only_for_right_answers(
    sessions: list[tuple[float, float]], shift: float
) -> None:
    rewards, log_probs = [list(column) for column in zip(*sessions, strict=True)]
    names = ["u"] * len(rewards)
    plain, found, shifted = (
        estimated("grpo_novelty", rewards, names, of)[0]
        for of in ([-1.0] * len(rewards), log_probs, [one + shift for one in log_probs])
    )
    assert all(math.isfinite(value) for value in found)
    for base, value, moved in zip(plain, found, shifted, strict=True):
        gained = value - base
        assert -1e-6 <= gained <= max(0.0, base / 2) + 1e-6
        assert moved == pytest.approx(value, abs=1e-3), "only differences of logprobs within the group count"
    if len(set(rewards)) == 1 and len(rewards) > 1:
        assert found == pytest.approx([0.0] * len(rewards), abs=1e-6)


@MANY
@given(st.lists(st.tuples(st.integers(0, 1), LOG_PROBS), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_the_bonus_does_not_see_the_order(sessions: list[tuple[int, float]], chance: Any) -> None:
    mixed = list(range(len(sessions)))
    chance.shuffle(mixed)
    names = ["u"] * len(sessions)
    before, after = (
        estimated("grpo_novelty", [float(r) for r, _ in of], names, [s for _, s in of])[0]
        for of in (sessions, [sessions[i] for i in mixed])
    )
    assert after == pytest.approx([before[i] for i in mixed], abs=1e-4)


@pytest.mark.parametrize("name", ["mc_grpo", "grpo_novelty"])
@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_finite_number_is_named(name: str, reward: float) -> None:
    with pytest.raises(ValueError, match=f"reward={reward}: cannot be compared"):
        estimated(name, [0.0, reward, 1.0], ["u"] * 3)


@pytest.mark.parametrize("name", ["mc_grpo", "grpo_novelty"])
def test_without_its_sessions_an_estimator_says_why(name: str) -> None:
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    estimated(name, [0.0, 1.0], ["u", "u"])
    with pytest.raises(RuntimeError, match="only trainer mode seamless"):
        get_adv_estimator_fn(name)(token_level_rewards=torch.ones(1, 1), response_mask=torch.ones(1, 1), index=["u"])
