"""A series of runs: each arm's own step, and what is said before any run when a baseline cannot run here."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.comparison import logged

from seamless_verl.cli.main import main
from seamless_verl.tools.compare import command
from seamless_verl.tools.compare.arms import ComparedArm, parse_arms, repeated
from seamless_verl.tools.compare.command import unable_lines
from seamless_verl.tools.compare.job import Options, PlannedRun, job_named
from seamless_verl.tools.compare.page import markdown, page
from seamless_verl.tools.compare.probe import ProbedArm
from seamless_verl.tools.compare.series import RunSeries, idle_unknown
from seamless_verl.tools.compare.store import StoredRun

MACHINE = {"processor": "Chip", "cores": 2, "memory_gb": 8.0, "load_average": [0.5]}
PLACE = {"began": 0.0, "ended": 4.0, "versions": {"verl": "0.9.1"}, "git": {}, "machine": MACHINE}


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run is made of takes git to find out."""
    monkeypatch.setattr("seamless_verl.tools.compare.series.fingerprint", lambda config, job: {})


class Made(RunSeries):
    """Its runs are made at once: each logs four steps."""

    def start(self, planned: PlannedRun, identity: Mapping[str, Any]) -> StoredRun:
        return StoredRun(logged(self.steps[planned.arm.name], seconds=1.0, evicted=1), [], PLACE)


def composed(samples: int) -> dict[str, Any]:
    actor = {"ppo_mini_batch_size": 2}
    rollout = {"n": samples, "nnodes": 0, "n_gpus_per_node": 0}
    return {
        "data": {"train_batch_size": 4},
        "trainer": {"device": "cpu", "nnodes": 1, "n_gpus_per_node": 1},
        "actor_rollout_ref": {"actor": actor, "rollout": rollout, "model": {"path": "m"}},
    }


def series(out: Path, arms: Mapping[str, int | str], **options: Any) -> Made:
    """Of arms as they are written, each with its samples of a prompt, or with the reason why it cannot run here."""
    return series_of(out, {arm: arms[arm.text] for arm in parse_arms(",".join(arms))}, **options)


def series_of(out: Path, arms: Mapping[ComparedArm, int | str], **options: Any) -> Made:
    probed = [
        ProbedArm(arm, (), None, what) if isinstance(what, str) else ProbedArm(arm, (), composed(what))
        for arm, what in arms.items()
    ]
    chosen = Options(steps=4, skip=1, seeds=(1,), **options)
    return Made(job_named(None, ["a=1"], out), probed, chosen, 1, out, "seamless-verl compare a=1")


def test_a_disk_that_is_full_between_two_runs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("seamless_verl.tools.compare.series.write_report", full)
    monkeypatch.setattr(command, "prepared", lambda *_: series(tmp_path, {"sync": 8, "seamless": 8}))
    monkeypatch.setattr(command, "exit_on_signals", lambda: None)
    assert main(["compare", "a=1", "--out", str(tmp_path)]) == 2
    assert f"--out='{tmp_path}': [Errno 28] No space left on device" in capsys.readouterr().err


def test_devices_that_are_not_all_here_have_no_idle_time_and_the_report_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [composed(8), composed(8)]
    for config, nodes in zip(configs, (1, 2), strict=True):
        config["trainer"] |= {"device": "cuda", "nnodes": nodes}
    cards = {"gpus": ["H100"] * 8, "driver": "1"}
    monkeypatch.setattr("seamless_verl.tools.compare.series.gpus", lambda: cards)
    assert idle_unknown(configs[:1], 8) == ""
    assert idle_unknown(configs, 8) == "they are on 2 machines, and only this machine's can be seen"
    assert idle_unknown(configs[:1], 16).startswith("there are 16, and 8 on this machine")
    assert idle_unknown([composed(8)], 1) == "", "a core"
    cards.clear()
    assert idle_unknown(configs[:1], 8) == "NVML cannot be used here"
    probed = [ProbedArm(arm, (), configs[0]) for arm in parse_arms("sync,seamless")]
    made = Made(job_named(None, ["a=1"], tmp_path), probed, Options(4, 1, (1,)), 8, tmp_path, "compare")
    assert made.device_use(1) is None
    made.runs += [made.run(planned) for planned in made.planned.values()]
    said = "idle is not known of these devices: NVML cannot be used here."
    assert f"- {said}" in markdown(made.comparison()) and said in page(made.comparison())


def test_each_arm_has_its_own_samples(tmp_path: Path) -> None:
    """The dropped group of a step, too, is one of the arm's own size."""
    odd = "odd:seamless.x=1"
    made = series(tmp_path, {"seamless": 8, odd: 9}, equal_tokens=True, validate=1)
    eight, nine = (made.run(planned) for planned in made.planned.values())
    assert [step.samples for step in eight.steps] == [32, 64, 96, 128]
    assert [step.samples for step in nine.steps] == [36, 72, 108, 144]
    assert [run.steps[0].dropped_tokens for run in (eight, nine)] == [8 * 4.0, 9 * 4.0]
    assert made.conditions()[0].startswith("4 steps of 32 (seamless) or 36 (odd) samples, 1 device(s)")
    same = series(tmp_path, {"sync": 8, "seamless": 8})
    assert same.conditions()[0].startswith("4 steps of 32 samples, 1 device(s)")


def test_at_equal_tokens_an_arm_makes_the_steps_that_it_has(tmp_path: Path) -> None:
    """And what it has learned by then is compared with nobody who made more."""
    long, short = (ProbedArm(arm, (), composed(8)) for arm in parse_arms("seamless,odd:seamless.x=1"))
    assert long.config is not None and short.config is not None
    long.config["trainer"]["total_training_steps"], short.config["trainer"]["total_training_steps"] = 4, 3
    chosen = Options(steps=4, skip=1, seeds=(1, 2), equal_tokens=True, validate=1)
    made = Made(job_named(None, ["a=1"], tmp_path), [long, short], chosen, 1, tmp_path, "seamless-verl compare a=1")
    made.runs += [made.run(planned) for planned in made.planned.values()]
    assert [len(run.steps) for run in made.runs] == [4, 3, 3, 4]
    assert made.conditions()[0].startswith("4 (seamless) or 3 (odd) steps of 32 samples")
    comparison = made.comparison()
    odd = comparison.summaries[1]
    assert odd.reward_test is None and odd.ratios.keys() & {"seconds", "reward"} == set() and odd.ratio is not None
    text = markdown(comparison)
    assert "the reward after 3 steps and after 4 is not compared" in text and "Seconds to a reward" not in text


def test_a_baseline_that_cannot_run_here_is_warned_of_with_the_one_in_its_place(tmp_path: Path) -> None:
    made = series(tmp_path, {"sync": "x=1: is bad. Set x=2.", "colocate_async": 8, "seamless": 8})
    text = (
        "sync cannot run here: x=1: is bad. Set x=2. It was to be the baseline. "
        "The ratios are relative to colocate_async instead."
    )
    assert unable_lines(made) == [f"warning: {text}"] and made.baseline == "colocate_async"
    assert f"\n\n**Warning**: {text}\n\n" in markdown(made.comparison())
    assert f'<div class="card warning">Warning: {text}</div>' in page(made.comparison())


def test_another_arm_that_cannot_run_here_is_no_baseline(tmp_path: Path) -> None:
    made = series(tmp_path, {"sync": 8, "colocate_async": "no room", "seamless": 8})
    assert unable_lines(made) == ["colocate_async cannot run here: no room"] and not made.warnings
    assert "Warning" not in markdown(made.comparison())


def test_each_learning_rate_has_a_baseline_to_lose(tmp_path: Path) -> None:
    able = {"sync lr=1e-3": "no room", "seamless lr=1e-3": 8, "sync lr=2e-3": 8, "seamless lr=2e-3": 8}
    arms = {arm: able[arm.name] for arm in repeated(parse_arms("sync,seamless"), (), ("1e-3", "2e-3"))}
    made = series_of(tmp_path, arms, rates=("1e-3", "2e-3"))
    (line,) = unable_lines(made)
    assert line.endswith("There are no ratios of the arms with learning rate 1e-3: only seamless lr=1e-3 can run here.")
