"""Estimators of this package are refused where they cannot compare sessions."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.config import tiny_run

from seamless_verl.config.checks import Settings, find_problems
from seamless_verl.config.checks.estimators import (
    PAIRS,
    WITHIN_GROUPS,
    check_lone_samples,
    check_own_estimators,
    check_turns,
)
from seamless_verl.config.checks.hosts import check_names
from seamless_verl.config.checks.modes import check_seamless
from seamless_verl.config.settings import Problem
from seamless_verl.config.verl_keys import OWN_ESTIMATORS

NAME, SESSIONS = "algorithm.adv_estimator", "actor_rollout_ref.rollout.n"


def found(tmp_path: Path, *overrides: str) -> list[Problem]:
    settings = Settings.of(tiny_run(tmp_path, *overrides), devices=1, accelerator=False)
    return find_problems(settings, [check_own_estimators, check_names, check_seamless])


@pytest.mark.parametrize("name", OWN_ESTIMATORS)
def test_it_runs_on_groups_of_sessions_in_our_mode(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, f"{NAME}={name}", f"{SESSIONS}=5") == []
    (problem,) = found(tmp_path, f"{NAME}={name}", f"{SESSIONS}=5", "trainer.v1.trainer_mode=colocate_async")
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
    (problem,) = found(tmp_path, f"{NAME}={name}", f"{SESSIONS}=1")
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
    (problem,) = found(tmp_path, f"{NAME}=mc_grpo", f"{SESSIONS}=4")
    assert problem.warning and "no pivot" in problem.reason and problem.way_out == f"Set {SESSIONS}=5"
    assert found(tmp_path, f"{NAME}=grpo_novelty", f"{SESSIONS}=4") == []


@pytest.mark.parametrize("name", OWN_ESTIMATORS)
def test_failed_sessions_may_not_leave_a_group_of_one(tmp_path: Path, name: str) -> None:
    (problem,) = found(tmp_path, f"{NAME}={name}", f"{SESSIONS}=5", "seamless.min_sessions=1")
    assert problem.key == "seamless.min_sessions" and f"lets {name} train a group of one" in problem.reason
