"""A setting that was given and that nothing reads brings a warning; what is left alone, or read, brings none."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.config import tiny_run

from seamless_verl.config import preflight
from seamless_verl.config.checks import Settings, find_problems
from seamless_verl.config.checks.modes import check_seamless
from seamless_verl.config.checks.unused import check_unused
from seamless_verl.config.planning import choose_handover, memory_facts
from seamless_verl.config.schema import Handover

ROLLOUT = "actor_rollout_ref.rollout"
POOL = (f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.checkpoint_engine.backend=gloo")
BOTH = "seamless.resources=[{count: 1, devices: 1, tags: [train, rollout]}, {count: 1, devices: 1, tags: [rollout]}]"


def warnings(folder: Path, *overrides: str, accelerator: bool = False) -> list[str]:
    settings = Settings.of(tiny_run(folder, *overrides), devices=2, accelerator=accelerator)
    problems = find_problems(settings, (check_unused,))
    assert all(problem.warning for problem in problems)
    return [str(problem) for problem in problems]


@pytest.mark.parametrize(
    "setting",
    [
        *("gateway.port=8000", "gateway.strict=True", "gateway.shards=2", "gateway.max_failed_groups=0.5"),
        *("restarts=1", "wait_for_machines_s=5"),
    ],
)
def test_verls_own_modes_read_no_setting_of_our_trainers(tmp_path: Path, setting: str) -> None:
    (warning,) = preflight(
        tiny_run(tmp_path, "trainer.v1.trainer_mode=sync", f"seamless.{setting}"), devices=1, accelerator=False
    )
    assert f"seamless.{setting}: is not read by trainer.v1.trainer_mode=sync" in warning


@pytest.mark.parametrize("setting", ["device_memory_gb=80", "host_memory_gb=100"])
def test_verls_own_modes_read_what_describes_the_machine_and_draw_nothing(tmp_path: Path, setting: str) -> None:
    assert not warnings(tmp_path, "trainer.v1.trainer_mode=sync", f"seamless.{setting}")


@pytest.mark.parametrize("setting", ["handover='released'", "handover='cache_only'", "lending='step_boundary'"])
def test_where_no_device_changes_hands_there_is_nothing_to_say_of_hand_overs(tmp_path: Path, setting: str) -> None:
    given = f"seamless.{setting}"
    (warning,) = warnings(tmp_path, *POOL, given)
    assert warning.startswith(f"{given}: has no effect in the disaggregated layout")
    assert not warnings(tmp_path, given)
    assert not warnings(tmp_path, BOTH, given)


@pytest.mark.parametrize("setting", ["handover=resident", "lending=never"])
def test_what_a_disaggregated_layout_does_anyway_may_be_set(tmp_path: Path, setting: str) -> None:
    assert not warnings(tmp_path, *POOL, f"seamless.{setting}")


def test_a_hand_over_that_no_device_makes_changes_no_estimate_and_needs_no_cache_to_free(tmp_path: Path) -> None:
    released = ("seamless.handover=released", f"{ROLLOUT}.free_cache_engine=False")
    for accelerator in (False, True):
        apart = Settings.of(tiny_run(tmp_path, *POOL, *released), devices=2, accelerator=accelerator)
        plain = Settings.of(tiny_run(tmp_path, *POOL), devices=2, accelerator=accelerator)
        assert choose_handover(apart).handover is Handover.RESIDENT
        assert memory_facts(apart) == memory_facts(plain)
        assert not check_seamless(apart)
    shared = Settings.of(tiny_run(tmp_path, released[0]), devices=2, accelerator=True)
    assert choose_handover(shared).handover is Handover.RELEASED


@pytest.mark.parametrize("handover", ["released", "cache_only"])
@pytest.mark.parametrize("setting", ["weights.kv='keep'"])
def test_replicas_that_all_release_their_cache_load_in_one_round(tmp_path: Path, handover: str, setting: str) -> None:
    given = (f"seamless.{setting}", f"seamless.handover={handover}")
    (warning,) = warnings(tmp_path, *given)
    assert warning.startswith(f"{given[0]}: has no effect with {given[1]} in the colocated layout")
    assert "Set seamless.handover=resident" in warning
    assert not warnings(tmp_path, given[0])
    assert not warnings(tmp_path, given[1])
    assert not warnings(tmp_path, *given, BOTH)


def test_a_hand_over_that_the_memory_chose_counts_as_one_that_was_set(tmp_path: Path) -> None:
    (warning,) = warnings(tmp_path, "seamless.weights.kv=keep", accelerator=True)
    assert "has no effect with seamless.handover=released in the colocated layout" in warning


@pytest.mark.parametrize(
    ("setting", "reader"),
    [
        ("tokens.grammar='train_all'", "seamless.gateway.enabled=true"),
        ("wait_for_machines_s=5", BOTH),
    ],
)
def test_an_option_of_what_is_not_chosen(tmp_path: Path, setting: str, reader: str) -> None:
    (warning,) = warnings(tmp_path, f"seamless.{setting}")
    assert warning.startswith(f"seamless.{setting}: is not read")
    assert reader.split("=[")[0] in warning
    assert not warnings(tmp_path, f"seamless.{setting}", reader)
    assert not warnings(tmp_path, reader)


@pytest.mark.parametrize("mode", ["sync", "seamless"])
@pytest.mark.parametrize("setting", ["cpu.devices=2"])
def test_devices_of_the_cpu_platform_beside_an_accelerator(tmp_path: Path, setting: str, mode: str) -> None:
    given = (f"seamless.{setting}", f"trainer.v1.trainer_mode={mode}")
    (warning,) = warnings(tmp_path, *given, accelerator=True)
    assert warning.startswith(f"seamless.{setting}: is not read where there is an accelerator")
    assert not warnings(tmp_path, *given)
