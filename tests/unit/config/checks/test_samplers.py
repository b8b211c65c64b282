"""Samplers are refused where they contradict budgets, engines or estimator, with the key and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.config import tiny_run

from seamless_verl.algorithms.samplers import SAMPLERS
from seamless_verl.config.checks import Settings
from seamless_verl.config.checks.samplers import check_sampler, seats_of
from seamless_verl.config.settings import Problem

NAME, SESSIONS, BY_STD = "seamless.sampler.name", "actor_rollout_ref.rollout.n", "algorithm.norm_adv_by_std_in_grpo"
GOOD = (f"{SESSIONS}=8", f"{BY_STD}=False", "actor_rollout_ref.rollout.max_num_seqs=128")


def settings_of(tmp_path: Path, *overrides: str) -> Settings:
    return Settings.of(tiny_run(tmp_path, *GOOD, *overrides), devices=1, accelerator=False)


def found(tmp_path: Path, *overrides: str) -> list[Problem]:
    return check_sampler(settings_of(tmp_path, *overrides))


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_runs_with_its_papers_options(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, f"{NAME}={name}") == []


def test_without_one_nothing_is_refused(tmp_path: Path) -> None:
    assert found(tmp_path, f"{SESSIONS}=1") == []
    assert found(tmp_path, f"{NAME}=dars", f"{SESSIONS}=1", "trainer.v1.trainer_mode=sync") == []


@pytest.mark.parametrize(
    ("overrides", "key", "way_out"),
    [
        ((f"{NAME}=dars", f"{BY_STD}=True"), BY_STD, f"Set {BY_STD}=False"),
        ((f"{NAME}=gdro", f"{SESSIONS}=1"), SESSIONS, f"Set {SESSIONS}=2 or more"),
        ((f"{NAME}=gdro", f"{SESSIONS}=129"), SESSIONS, f"Set {SESSIONS}=127 or less, or another sampler"),
        ((f"{NAME}=dars", f"{SESSIONS}=32"), SESSIONS, f"Set {SESSIONS}=31 or less, or another sampler"),
        (
            (f"{NAME}=dars", "seamless.tokens.weigh=sequence"),
            "seamless.tokens.weigh",
            "Set seamless.tokens.weigh=session",
        ),
        (
            (f"{NAME}=gdro", "algorithm.adv_estimator=mc_grpo"),
            "algorithm.adv_estimator",
            f"Set algorithm.adv_estimator=grpo, or {NAME}=srpo, which keeps their size",
        ),
    ],
)
def test_what_contradicts_is_refused(tmp_path: Path, overrides: tuple[str, ...], key: str, way_out: str) -> None:
    (problem,) = found(tmp_path, *overrides)
    assert (problem.key, problem.way_out, problem.warning) == (key, way_out, False)


def test_more_samples_than_the_engines_run_at_once_are_refused(tmp_path: Path) -> None:
    seats = "actor_rollout_ref.rollout.max_num_seqs"
    (problem,) = found(tmp_path, f"{NAME}=dars_hardness", f"{seats}=48")
    assert (problem.key, problem.value) == (seats, 48) and "48 calls" in problem.reason and "up to 64" in problem.reason
    assert problem.way_out == f"Set {seats}=64 or more, or another sampler"
    assert found(tmp_path, f"{NAME}=dars", f"{seats}=48") == []
    two = settings_of(tmp_path, f"{seats}=48", "actor_rollout_ref.rollout.nnodes=1", "seamless.layout=multiplexed")
    assert seats_of(two) == 48 + 48 * two.integer("actor_rollout_ref.rollout.n_gpus_per_node", 0, least=0)


def test_rewards_that_may_be_below_zero_are_refused_with_the_setting_that_maps_them(tmp_path: Path) -> None:
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    overlong = (f"+{buffer}.enable=True", f"+{buffer}.len=4", f"+{buffer}.penalty_factor=1.0")
    (problem,) = found(tmp_path, f"{NAME}=srpo", *overlong)
    assert (problem.key, problem.value, problem.warning) == ("seamless.sampler.success", None, False)
    assert problem.way_out == "Set seamless.sampler.success to the least reward of a right answer"
    assert found(tmp_path, f"{NAME}=srpo", "seamless.sampler.success=1.0", *overlong) == []
    assert found(tmp_path, f"{NAME}=srpo", f"+{buffer}.enable=False") == []


def test_an_estimator_that_does_not_divide_needs_no_setting(tmp_path: Path) -> None:
    assert found(tmp_path, f"{NAME}=dars", f"{BY_STD}=True", "algorithm.adv_estimator=rloo") == []


def test_srpo_keeps_the_size_of_groups(tmp_path: Path) -> None:
    assert found(tmp_path, f"{NAME}=srpo", f"{SESSIONS}=5", "algorithm.adv_estimator=mc_grpo") == []


def test_an_option_that_is_not_read_brings_a_warning(tmp_path: Path) -> None:
    (problem,) = found(tmp_path, f"{NAME}=dars", "seamless.sampler.threshold=0.9")
    assert problem.warning and problem.key == "seamless.sampler.threshold" and problem.reason == "is not read by dars"
    (alone,) = found(tmp_path, "seamless.sampler.success=0.5")
    assert alone.warning and alone.reason == "is not read without a sampler"
