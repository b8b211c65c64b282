"""What runs over several seeds have learned, and when two arms differ by more than noise."""

from __future__ import annotations

from pathlib import Path

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.rewards.__main__ import SeedRun, main, parse_seeds
from seamless_verl.tools.bench.rewards.validation_curves import (
    learned_reward,
    learned_rewards,
    read_validation_curve,
    report_lines,
)
from seamless_verl.tools.compare.arms import folder_name, parse_arms

NAME = "val-core/arithmetic/reward/mean@1"


def test_a_curve_is_the_mean_reward_of_each_validation() -> None:
    rows = [
        {"step": 0, "data": {NAME: 0.1}},
        {"step": 1, "data": {"critic/score/mean": 0.3}},
        {"step": 2, "data": {NAME: 0.2}},
        {"step": 2, "data": {NAME: 0.4}},
    ]
    assert read_validation_curve(rows) == {0: 0.1, 2: 0.4}


def test_with_several_data_sources_it_is_the_mean_of_theirs() -> None:
    other = "val-core/longer/reward/mean@1"
    assert read_validation_curve([{"step": 1, "data": {NAME: 0.1, other: 0.3}}]) == {1: pytest.approx(0.2)}


def test_the_last_validations_count() -> None:
    assert learned_reward({30: 0.5, 0: 0.0, 10: 0.1, 20: 0.3}) == pytest.approx(0.3)


def test_arms_differ_or_are_within_noise() -> None:
    low = [{5: value} for value in (0.1, 0.2, 0.3)]
    near = [{5: value} for value in (0.2, 0.3, 0.4)]
    far = [{5: value} for value in (0.7, 0.8, 0.9)]
    text = "\n".join(report_lines({"sync": low, "near": near, "far": far}))
    assert "near: 0.300, +0.100 +- 0.227 (95%) to sync: within noise" in text
    assert "far: 0.800, +0.600 +- 0.227 (95%) to sync: differs" in text


def test_noise_is_that_of_welchs_test() -> None:
    """Variances 0.01 and 0.0004 of two and three runs: 1.05 degrees of freedom, of which one counts."""
    first = learned_rewards([{5: 0.4}, {5: 0.4 + 0.02**0.5}])
    other = learned_rewards([{5: value} for value in (0.48, 0.5, 0.52)])
    assert first.difference(other)[1] == pytest.approx(12.71 * (0.01 / 2 + 0.0004 / 3) ** 0.5)
    same = learned_rewards([{5: 0.5}, {5: 0.5}])
    assert same.difference(same) == (0, 0)


def test_steps_at_which_not_all_validated_are_left_out() -> None:
    whole, other = {0: 0.1, 5: 0.2}, {0: 0.1, 4: 0.2}
    text = "\n".join(report_lines({"sync": [whole, whole], "b": [other, whole]}))
    assert "\n   0  " in text and "\n   5  " not in text and "\n   4  " not in text


def test_long_names_stand_above_the_table() -> None:
    long, validation_curves = "seamless:seamless.max_staleness=4:seamless.ahead=1", [{5: 0.2}, {5: 0.4}]
    lines = list(report_lines({"sync": validation_curves, long: validation_curves}))
    assert lines[:2] == ["[1] sync", f"[2] {long}"] and lines[2].split()[:3] == ["step", "[1]", "[2]"]
    assert max(map(len, lines[2:4])) < 80 and lines[-1].startswith(f"{long}: 0.300, +0.000")


@pytest.mark.parametrize("text", ["1", "", "a,b", "1,2,", "1,1", "1,2,2"])
def test_one_seed_is_no_comparison(text: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        parse_seeds(text)


def test_a_recipe_is_a_folder_with_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--recipe", "/no/recipe"]) == 2
    assert "--recipe='/no/recipe': has no run.sh" in capsys.readouterr().err


@pytest.mark.parametrize("arm", ["synk", "seamless:ahead", "", "sync,sync"])
def test_an_arm_is_a_mode_with_settings(arm: str) -> None:
    with pytest.raises(ConfigError, match="--arms"):
        parse_arms(arm)


def test_hydra_takes_the_overrides_of_an_arm_with_settings() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    arm = "seamless:seamless.max_staleness=4:seamless.ahead=1"
    _, *overrides = SeedRun(arm, 1, Path("/out") / folder_name(arm), ["trainer.test_freq=5"]).command(Path("/recipe"))
    found = {first.key_or_group: first.value() for first in OverridesParser.create().parse_overrides(overrides)}
    assert (found["seamless.max_staleness"], found["seamless.ahead"], found["data.seed"]) == (4, 1, 1)
    assert found["trainer.v1.trainer_mode"] == "seamless" and found["trainer.default_local_dir"].startswith("/out/")


def test_a_run_with_too_few_validations_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps", "10", "--every", "5"]) == 2
    assert "--steps=10: holds fewer than 3 validations" in capsys.readouterr().err


def test_an_arm_of_many_settings_has_a_folder_that_a_file_system_takes() -> None:
    arms = [f"seamless:{'data.seed=1:' * 40}seamless.ahead={ahead}" for ahead in (1, 2)]
    names = [folder_name(arm) for arm in arms]
    assert names[0] != names[1] and all(len(f"{name}-seed100") <= 255 for name in names)
    assert folder_name("seamless:seamless.ahead=1") == "seamless_seamless.ahead_1"
