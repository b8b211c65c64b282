"""What runs over several seeds have learned, and when two arms differ by more than noise."""

from __future__ import annotations

import pytest

from seamless_verl.bench.rewards.__main__ import main, named, seeds_of
from seamless_verl.bench.rewards.curves import Learned, learned, rewards, table
from seamless_verl.errors import ConfigError

NAME = "val-core/arithmetic/reward/mean@1"


def test_a_curve_is_the_mean_reward_of_each_validation() -> None:
    rows = [
        {"step": 0, "data": {NAME: 0.1}},
        {"step": 1, "data": {"critic/score/mean": 0.3}},
        {"step": 2, "data": {NAME: 0.2}},
        {"step": 2, "data": {NAME: 0.4}},
    ]
    assert rewards(rows) == {0: 0.1, 2: 0.4}


def test_the_last_validations_count() -> None:
    assert learned({30: 0.5, 0: 0.0, 10: 0.1, 20: 0.3}) == pytest.approx(0.3)


def test_arms_differ_by_more_than_two_standard_errors_or_are_within_noise() -> None:
    low = [{0: value} for value in (0.1, 0.2, 0.3)]
    near = [{0: value} for value in (0.2, 0.3, 0.4)]
    far = [{0: value} for value in (0.7, 0.8, 0.9)]
    assert Learned.of(near).differs(Learned.of(low)) == pytest.approx((0.1, 2 * (0.02 / 3) ** 0.5))
    text = "\n".join(table({"sync": low, "near": near, "far": far}))
    assert "near: 0.300, +0.100 to sync, two standard errors 0.163: within noise" in text
    assert "far: 0.800, +0.600 to sync, two standard errors 0.163: differs" in text


def test_steps_at_which_not_all_validated_are_left_out() -> None:
    text = "\n".join(table({"sync": [{0: 0.1, 5: 0.2}, {0: 0.1, 5: 0.2}], "b": [{0: 0.1, 4: 0.2}, {0: 0.1, 5: 0.2}]}))
    assert "\n   0  " in text and "\n   5  " not in text and "\n   4  " not in text


@pytest.mark.parametrize("text", ["1", "", "a,b", "1,2,"])
def test_one_seed_is_no_comparison(text: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        seeds_of(text)


def test_a_recipe_is_a_folder_with_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", "/no/recipe"]) == 2
    assert "--recipe='/no/recipe': has no run.sh" in capsys.readouterr().err


def test_an_arm_with_settings_is_a_folder_name() -> None:
    assert named("seamless:seamless.ahead=1") == "seamless_seamless.ahead=1"
