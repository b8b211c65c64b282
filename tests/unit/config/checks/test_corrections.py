"""Losses, estimators and corrections are refused where they lack what they need."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.config import tiny_run

from seamless_verl.config.checks import Settings, find_problems
from seamless_verl.config.checks.corrections import (
    PAIRS,
    WITHIN_GROUPS,
    check_bypass,
    check_lone_samples,
    check_own_estimators,
    check_own_losses,
    check_staleness,
    check_turns,
)
from seamless_verl.config.checks.hosts import check_names
from seamless_verl.config.checks.modes import check_seamless
from seamless_verl.config.schema import CORRECTED_STALENESS, HARMLESS_STALENESS
from seamless_verl.config.settings import Problem
from seamless_verl.config.verl_keys import OWN_ESTIMATORS

BYPASS = "algorithm.rollout_correction.bypass_mode=True"
IS = "algorithm.rollout_correction.rollout_is"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
STALE = "seamless.max_staleness=4"


def found(tmp_path: Path, *overrides: str) -> list[Problem]:
    settings = Settings.of(tiny_run(tmp_path, *overrides), devices=1, accelerator=False)
    return [problem for one in (check_own_losses, check_bypass, check_staleness) for problem in one(settings)]


@pytest.mark.parametrize(
    ("setting", "way_out"),
    [
        (f"{IS}=token", "Set algorithm.rollout_correction.bypass_mode=False, or "),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "Set algorithm.rollout_correction.bypass_mode=False, or "),
        ("algorithm.rollout_correction.loss_type=reinforce", f"Remove it, or {LOSS}=bypass_mode with "),
    ],
)
def test_what_bypass_mode_leaves_out_is_refused(tmp_path: Path, setting: str, way_out: str) -> None:
    (problem,) = found(tmp_path, BYPASS, setting)
    assert f"{problem.key}={problem.value}" == setting and not problem.warning
    assert "verl's V1 trainers" in problem.reason and problem.way_out.startswith(way_out)
    assert found(tmp_path, setting) == []
    (warned,) = found(tmp_path, BYPASS, setting, "trainer.v1.trainer_mode=sync")
    assert warned.warning and warned.key == problem.key
    assert found(tmp_path, BYPASS, setting, "trainer.v1.trainer_mode=sync", "trainer.use_v1=False") == []


@pytest.mark.parametrize(
    "corrected",
    [
        *((BYPASS, f"{LOSS}={loss}") for loss in ("dppo_tv", "dppo_kl", "interpolated", "m2po")),
        (f"{IS}=token",),
        (f"{LOSS}=bypass_mode", "+actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type=reinforce"),
        (f"seamless.tokens.policy=mask_older_than:{HARMLESS_STALENESS}",),
        ("seamless.max_staleness=1",),
    ],
)
def test_staleness_brings_a_warning_that_names_the_corrections(tmp_path: Path, corrected: tuple[str, ...]) -> None:
    (warning,) = found(tmp_path, STALE, BYPASS)
    assert warning.warning and (warning.key, warning.value) == ("seamless.max_staleness", 4)
    for name in ("correction.loss=dppo", "interpolated", "m2po", "bypass_mode=False", "rollout_is=token"):
        assert name in warning.way_out
    assert found(tmp_path, STALE, *corrected) == []


def test_a_mask_of_older_tokens_than_are_harmless_is_none(tmp_path: Path) -> None:
    mask = (f"seamless.tokens.policy=mask_older_than:{HARMLESS_STALENESS + 1}",)
    assert [problem.key for problem in found(tmp_path, STALE, *mask)] == ["seamless.max_staleness"]


def test_more_than_was_compared_brings_a_warning(tmp_path: Path) -> None:
    far = f"seamless.max_staleness={CORRECTED_STALENESS + 1}"
    (warning,) = found(tmp_path, far, BYPASS, f"{LOSS}=dppo_tv")
    assert warning.warning and (warning.key, warning.value) == ("seamless.max_staleness", CORRECTED_STALENESS + 1)
    assert "seamless-verl compare" in warning.way_out
    mask = (f"seamless.tokens.policy=mask_older_than:{CORRECTED_STALENESS}",)
    assert found(tmp_path, far, BYPASS, f"{LOSS}=dppo_tv", *mask) == []


@pytest.mark.parametrize("loss", ["interpolated", "m2po"])
def test_a_loss_of_ours_needs_our_mode(tmp_path: Path, loss: str) -> None:
    (problem,) = found(tmp_path, f"{LOSS}={loss}", BYPASS, "trainer.v1.trainer_mode=colocate_async")
    assert (problem.key, problem.value) == (LOSS, loss) and "trainer_mode=seamless" in problem.way_out


def test_nothing_is_interpolated_that_is_computed(tmp_path: Path) -> None:
    (problem,) = found(tmp_path, f"{LOSS}=interpolated")
    assert problem.key == LOSS and "bypass_mode=True" in problem.way_out and not problem.warning
    assert found(tmp_path, f"{LOSS}=m2po") == []


NAME, SESSIONS = "algorithm.adv_estimator", "actor_rollout_ref.rollout.n"


def estimators(tmp_path: Path, *overrides: str) -> list[Problem]:
    settings = Settings.of(tiny_run(tmp_path, *overrides), devices=1, accelerator=False)
    return find_problems(settings, [check_own_estimators, check_names, check_seamless])


@pytest.mark.parametrize("name", OWN_ESTIMATORS)
def test_it_runs_on_groups_of_sessions_in_our_mode(tmp_path: Path, name: str) -> None:
    assert estimators(tmp_path, f"{NAME}={name}", f"{SESSIONS}=5") == []
    (problem,) = estimators(tmp_path, f"{NAME}={name}", f"{SESSIONS}=5", "trainer.v1.trainer_mode=colocate_async")
    assert (problem.key, problem.value) == (NAME, name) and not problem.warning
    assert problem.way_out == f"Set trainer.v1.trainer_mode=seamless, or {NAME}=grpo"


@pytest.mark.parametrize(
    ("name", "reason", "enough"),
    [
        ("mc_grpo", "it is its own pivot, which is not trained", "3 or another odd number"),
        ("grpo_novelty", "nothing to compare it with", "2 or more"),
        ("hgpo", "nothing to compare it with", "2 or more"),
    ],
)
def test_a_group_of_one_is_refused(tmp_path: Path, name: str, reason: str, enough: str) -> None:
    (problem,) = estimators(tmp_path, f"{NAME}={name}", f"{SESSIONS}=1")
    assert (problem.key, problem.value) == (NAME, name) and reason in problem.reason and not problem.warning
    assert problem.way_out == f"Set {SESSIONS}={enough}, or another estimator"


@pytest.mark.parametrize("name", [PAIRS, *WITHIN_GROUPS])
def test_a_group_of_one_is_said_with_an_estimator_of_verl(tmp_path: Path, name: str) -> None:
    def warned(*overrides: str) -> list[Problem]:
        settings = Settings.of(tiny_run(tmp_path, *overrides), devices=1, accelerator=False)
        return find_problems(settings, [check_lone_samples])

    (problem,) = warned(f"{NAME}={name}", f"{SESSIONS}=1")
    assert (problem.key, problem.value, problem.warning) == (NAME, name, name != PAIRS)
    assert "nothing to compare it with" in problem.reason and problem.way_out == f"Set {SESSIONS}=4 or more"
    assert warned(f"{NAME}={name}", f"{SESSIONS}=2") == warned(f"{NAME}=gae", f"{SESSIONS}=1") == []
    sampler = f"{NAME}={name}", f"{SESSIONS}=1", "seamless.sampler.name=dars"
    assert warned(*sampler) == []
    assert len(warned(*sampler, "trainer.v1.trainer_mode=sync")) == 1


def test_turns_are_compared_where_there_are_turns(tmp_path: Path) -> None:
    def refused(*overrides: str) -> list[Problem]:
        return find_problems(Settings.of(tiny_run(tmp_path, *overrides), devices=1, accelerator=False), [check_turns])

    (problem,) = refused(f"{NAME}=hgpo", f"{SESSIONS}=4")
    assert (problem.key, problem.value, problem.warning) == (NAME, "hgpo", False)
    assert "each session is one turn" in problem.reason
    assert problem.way_out.startswith("Set seamless.gateway.enabled=true and train an agent")
    assert refused(f"{NAME}=hgpo", f"{SESSIONS}=4", "seamless.gateway.enabled=true") == []
    assert refused(f"{NAME}=grpo_novelty", f"{SESSIONS}=4") == []


def test_an_even_group_has_no_pivot(tmp_path: Path) -> None:
    (problem,) = estimators(tmp_path, f"{NAME}=mc_grpo", f"{SESSIONS}=4")
    assert problem.warning and "no pivot" in problem.reason and problem.way_out == f"Set {SESSIONS}=5"
    assert estimators(tmp_path, f"{NAME}=grpo_novelty", f"{SESSIONS}=4") == []


@pytest.mark.parametrize("name", OWN_ESTIMATORS)
def test_failed_sessions_may_not_leave_a_group_of_one(tmp_path: Path, name: str) -> None:
    (problem,) = estimators(tmp_path, f"{NAME}={name}", f"{SESSIONS}=5", "seamless.min_sessions=1")
    assert problem.key == "seamless.min_sessions" and f"lets {name} train a group of one" in problem.reason
