"""The job that is compared, options that make no sense, and the runs: their order, folders and command lines."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import parse_arm, parse_arms
from seamless_verl.tools.compare.job import MAIN, PROBE, Options, check_arms, job_named, planned_runs, shared_overrides


def test_a_recipe_is_found_by_name_or_folder_and_run_by_its_script(tmp_path: Path) -> None:
    by_name = job_named("arithmetic_grpo", ["a=1"], tmp_path)
    assert by_name.script is not None and by_name.script.name == "run.sh" and by_name.name == "arithmetic_grpo"
    assert job_named(str(by_name.script.parent), ["a=1"], tmp_path) == by_name
    assert by_name.command(["a=2"]) == [str(by_name.script), "a=1", "a=2"], "of two values the arm's holds"
    env = by_name.environment(tmp_path / "run")
    assert (env["DATA"], env["MAIN"], env["PYTHON"]) == (str(tmp_path / "data"), MAIN, sys.executable)
    assert by_name.probe([], tmp_path, tmp_path / "found")[1]["MAIN"] == PROBE


def test_a_config_is_run_as_it_is_with_the_users_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("{}")
    monkeypatch.setenv("DATA", "/of/the/user")
    job = job_named(str(tmp_path / "mine.yaml"), [], tmp_path)
    command = job.command(["a=2"])
    assert command[3:8] == ["-m", MAIN, "--config-dir", str(tmp_path), "--config-name"] and command[8] == "mine"
    assert job.probe(["a=2"], tmp_path, tmp_path)[0] == [PROBE if word == MAIN else word for word in command]
    assert job.environment(tmp_path)["DATA"] == "/of/the/user"


def test_settings_alone_are_a_job(tmp_path: Path) -> None:
    assert job_named(None, ["a=1"], tmp_path).command(["b=2"])[3:] == ["-m", MAIN, "a=1", "b=2"]


@pytest.mark.parametrize("target", ["no_such", "/no/config.yaml", "README.md"])
def test_anything_else_is_refused_with_the_recipes(target: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is no recipe and no config file.*arithmetic_grpo"):
        job_named(target, [], tmp_path)


@pytest.mark.parametrize(
    ("script", "passes"),
    [
        ('exec python -m "${MAIN:-seamless_verl.main_ppo}" "$@"', True),
        ('MAIN="${MAIN:-x}"\nexec python -m "$MAIN" "$@"', True),
        ('exec python -m seamless_verl.main_ppo "$@"', False),
        ("# MAIN=other ./run.sh, or $MAIN\nexec python -m seamless_verl.main_ppo", False),
        ('exec python -m "$MAINS"', False),
    ],
)
def test_a_script_that_would_train_while_it_is_checked_is_refused(tmp_path: Path, script: str, passes: bool) -> None:
    (tmp_path / "run.sh").write_text(f"#!/usr/bin/env bash\n{script}\n")
    if passes:
        assert job_named(str(tmp_path), [], tmp_path).script is not None
        return
    with pytest.raises(ConfigError, match=r'run\.sh.*does not read MAIN.*End it in -m "\$\{MAIN:-seamless_verl.main'):
        job_named(str(tmp_path), [], tmp_path)


def test_the_runners_of_a_recipe_would_be_started_by_its_check(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not read MAIN"):
        job_named("runner", [], tmp_path)
    with pytest.raises(ConfigError) as error:
        job_named("no_such", [], tmp_path)
    assert "runner" not in error.value.way_out.replace("(", "").split(", ") and "swe_agent" in error.value.way_out


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("job.yml", "a: 1", r"hydra reads config files whose names end in \.yaml\. Name it job\.yaml"),
        ("job.yaml", "a: [1\nb: 2", "is not YAML: .*line 2"),
        ("job.yaml", "\xff", "is not YAML"),
        ("job.yaml", "- a", "has no settings by name"),
    ],
)
def test_a_config_that_hydra_would_not_read_is_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    (tmp_path / "job.yaml").write_text("a: 1")  # another job, which must not be taken
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=f"{name}.*{reason}"):
        job_named(str(tmp_path / name), [], tmp_path)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (Options(steps=4, skip=4), "--skip"),
        (Options(rounds=0), "--rounds"),
        (Options(seeds=(1, 1)), "--seeds"),
        (Options(steps=20, validate=7), "--validate"),
        (Options(validate=-1), "--validate"),
        (Options(validate=-1), "--validate=-1: is no number of steps"),
        (Options(devices=0), "--devices"),
        (Options(timeout_s=-5.0), "--timeout=-5.0"),
        (Options(timeout_s=0.0), "--timeout"),
        (Options(timeout_s=math.nan), "--timeout=nan"),
        (Options(target_reward=math.inf), "--target-reward=inf"),
    ],
)
def test_options_that_make_no_comparison_are_refused(options: Options, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        options.check()


def test_the_default_and_validations_pass() -> None:
    Options().check()
    Options(steps=21, validate=7).check()


def test_every_arm_runs_once_for_a_seed_and_round_and_none_always_first() -> None:
    runs = list(planned_runs(parse_arms("sync,seamless"), Options(seeds=(1, 2), rounds=2), Path("/out")))
    assert [run.key for run in runs] == [
        *(("sync", 1, 1), ("seamless", 1, 1), ("seamless", 2, 1), ("sync", 2, 1)),
        *(("sync", 1, 2), ("seamless", 1, 2), ("seamless", 2, 2), ("sync", 2, 2)),
    ]
    assert len({run.folder for run in runs}) == 8 and runs[0].folder == Path("/out/sync-seed1-r1")


def test_a_run_validates_only_if_it_was_asked_to_and_never_saves() -> None:
    found = shared_overrides(Options(steps=21, validate=7), 3, Path("/f"))
    assert {"trainer.test_freq=7", "trainer.val_before_train=True", "trainer.save_freq=-1", "data.seed=3"} <= {*found}
    assert {"trainer.test_freq=-1", "trainer.val_before_train=False"} <= {*shared_overrides(Options(), 1, Path("/f"))}


def test_the_option_needs_a_mode_of_verls() -> None:
    with pytest.raises(ConfigError, match=r"--arms=.*--short-poll is for verl's modes"):
        check_arms([parse_arm("seamless")], Options(short_poll=True))
    check_arms([parse_arm("sync"), parse_arm("seamless")], Options(short_poll=True))
