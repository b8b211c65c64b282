"""Arms repeated over permitted staleness and learning rates: their names, settings, and what is refused."""

from __future__ import annotations

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import parse_arms, repeated
from seamless_verl.tools.compare.command import parse_bounds, parse_rates

LR = "actor_rollout_ref.actor.optim.lr"


def test_only_arms_of_ours_without_a_bound_of_their_own_are_repeated_over_bounds() -> None:
    arms = repeated(parse_arms("sync,seamless,far:max_staleness=9:ahead=2,near:ahead=1"), [0, 4], [])
    assert [arm.name for arm in arms] == ["sync", "seamless s=0", "seamless s=4", "far", "near s=0", "near s=4"]
    assert arms[2].settings == ("seamless.max_staleness=4",)
    assert arms[3].settings == ("seamless.max_staleness=9", "seamless.ahead=2")
    assert arms[5].settings == ("seamless.ahead=1", "seamless.max_staleness=4")
    assert [arm.line for arm in arms] == ["", "seamless", "seamless", "", "near", "near"]


def test_every_arm_is_repeated_over_learning_rates_those_of_one_together() -> None:
    arms = repeated(parse_arms("sync,seamless"), [1], ["5e-4", "1e-3"])
    assert [arm.name for arm in arms] == [
        "sync lr=5e-4",
        "seamless s=1 lr=5e-4",
        "sync lr=1e-3",
        "seamless s=1 lr=1e-3",
    ]
    assert arms[3].settings == ("seamless.max_staleness=1", f"{LR}=1e-3")
    assert [(arm.rate, arm.system) for arm in arms[2:]] == [("1e-3", "sync"), ("1e-3", "seamless s=1")]
    assert arms[3].line == "seamless lr=1e-3"


def test_a_repeated_arm_can_be_written_again() -> None:
    (arm,) = repeated(parse_arms("seamless"), [4], ["1e-3"])
    (again,) = parse_arms(arm.text)
    assert again.settings == arm.settings


def test_without_both_the_arms_stay_as_they_are() -> None:
    arms = parse_arms("sync,seamless")
    assert repeated(arms, [], []) == arms


@pytest.mark.parametrize(
    ("arms", "bounds", "rates", "reason"),
    [
        ("sync,colocate_async", [1], [], "--staleness=.*no arm takes it"),
        ("sync,seamless:max_staleness=1", [1], [], "--staleness=.*no arm takes it"),
        (f"sync,sync:{LR}=1e-4", [], ["1e-3"], "--learning-rates=.*sets actor_rollout_ref"),
        ("a:ahead=1,a:ahead=2", [1], [], "--arms"),
    ],
)
def test_what_cannot_be_repeated_is_refused(arms: str, bounds: list[int], rates: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        repeated(parse_arms(arms), bounds, rates)


@pytest.mark.parametrize("text", ["", "a", "0,-1", "1,01", "1.5"])
def test_bounds_are_whole_numbers_each_once(text: str) -> None:
    assert parse_bounds("0,1,20") == [0, 1, 20]
    with pytest.raises(ConfigError, match="--staleness"):
        parse_bounds(text)


@pytest.mark.parametrize("text", ["", "a", "0", "-1e-3", "nan", "inf", "1e-3,0.001"])
def test_learning_rates_are_numbers_above_0_each_once(text: str) -> None:
    assert parse_rates("5e-4,1e-3") == ["5e-4", "1e-3"]
    with pytest.raises(ConfigError, match="--learning-rates"):
        parse_rates(text)
