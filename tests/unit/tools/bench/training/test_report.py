"""A report of runs on disk, and the order in which runs are made."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.training import __main__ as command
from seamless_verl.tools.bench.training.arms import arms_named
from seamless_verl.tools.bench.training.figures import count_common, differences, figures, read_samples
from seamless_verl.tools.bench.training.report import baseline_of, bound_of, make_report, report_text, write_result
from seamless_verl.tools.bench.training.workloads import WORKLOADS
from seamless_verl.tools.compare.processes import Tail

W3 = WORKLOADS["w3"]
STEPS = 3


def write_run(folder: Path, arm: str, number: int, step_s: float, shift: int = 0) -> Path:
    """A finished run of `STEPS` steps of so many seconds; `shift` makes its lengths those of other prompts."""
    place = folder / f"{arm}-r{number}"
    place.mkdir(parents=True)
    samples, steps = [], []
    for index in range(STEPS * W3.prompts):
        for session in range(W3.samples):
            tokens = [turn.tokens for turn in W3.sample(index + shift, session)]
            line = {"index": index, "session": session, "prompt": [1, 2], "tokens": tokens, "seconds": [0.5] * 4}
            samples.append(line)
    for n in range(STEPS):
        generated = W3.generated(range(n * W3.prompts, (n + 1) * W3.prompts)) + W3.tool_tokens_of_step
        data = {
            "response_length/mean": generated / W3.step_samples,
            "critic/score/mean": n / 10,
            "timing_s/update_actor": 0.5,
            "perf/total_num_tokens": generated + 2 * W3.step_samples,
        }
        steps.append({"at": 60 + n * step_s, "step": n + 1, "data": data})
    (place / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    (place / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    write_result(place, arm, number, figures(W3, steps, skip=1, trains=1))
    return place


def test_runs_of_several_rounds_are_one_table(tmp_path: Path) -> None:
    for number in (1, 2):
        write_run(tmp_path, "sync", number, 4.0)
        write_run(tmp_path, "seamless-multiplexed-s1", number, 2.0)
    (tmp_path / "sync-r3").mkdir()  # cut short: it has no result
    (tmp_path / "rates.json").write_text(json.dumps({"32": 5000, "64": 8000}))
    report = make_report(W3, STEPS, tmp_path)
    assert report is not None and report.unequal == [] and report.baseline == "sync"
    assert [(row.arm, row.rounds, row.ratio, row.budget) for row in report.rows] == [
        ("seamless-multiplexed-s1", 2, pytest.approx(2.0), 1.0),
        ("sync", 2, 1.0, 1.0),
    ]
    assert report.reward_curves["sync-r1"] == [0.0, 0.1, 0.2]
    text = report_text(report)
    assert "in all runs; 192 samples are in every one" in text and "a tool's work 0.38 s" in text
    values = json.loads(json.dumps(report.as_json()))
    assert values["bound"]["step_s"] == pytest.approx((values["bound"]["generate_s"] + values["bound"]["update_s"]) / 2)
    share = report.rows[0].tokens_per_s / values["bound"]["tokens_per_s"]
    assert f"{share:.0%}\n" in text


def test_a_run_that_did_other_work_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, "sync", 1, 4.0)
    write_run(tmp_path, "sync-poll", 1, 4.0, shift=1)
    report = make_report(W3, STEPS, tmp_path)
    assert report is not None and report.bound is None
    assert report.unequal[0] == "sync-r1 differs from sync-poll-r1 at prompt 0, sample 0"
    assert "NOT THE SAME WORK" in report_text(report)


def test_without_a_finished_run_there_is_no_report(tmp_path: Path) -> None:
    assert make_report(W3, STEPS, tmp_path) is None


def test_the_baseline_is_verls_default_mode_where_it_ran() -> None:
    assert baseline_of(["seamless-colocated-s1", "sync-poll", "sync"]) == "sync"
    assert baseline_of(["seamless-colocated-s1", "sync-poll"]) == "sync-poll"
    assert baseline_of(["separate_async", "seamless-colocated-s1"]) == "separate_async"


def test_the_bound_takes_the_fastest_update(tmp_path: Path) -> None:
    write_run(tmp_path, "sync", 1, 4.0)
    report = make_report(W3, STEPS, tmp_path)
    assert report is not None
    (once,) = report.rows
    rows = [replace(once, update_s_per_token=value) for value in (3e-4, 1e-4, None, 2e-4)]
    limit = bound_of(W3, STEPS, rows, 2.0, {64: 8000.0})
    assert limit is not None and limit.update_s == pytest.approx(limit.trained * 1e-4)
    assert bound_of(W3, STEPS, rows, 2.0, {}) is None


def test_samples_by_place(tmp_path: Path) -> None:
    place = write_run(tmp_path, "sync", 1, 4.0)
    samples = read_samples(place / "samples.jsonl")
    assert samples[5, 2].tokens == tuple(turn.tokens for turn in W3.sample(5, 2))
    assert count_common([samples, {(5, 2), (48, 0)}]) == 1 and count_common([]) == 0
    other = {**samples, (5, 2): samples[5, 3]}
    assert differences({"one": samples, "two": other}) == ["two differs from one at prompt 5, sample 2"]
    with (place / "samples.jsonl").open("a") as file:
        file.write((place / "samples.jsonl").read_text().splitlines()[0] + "\n")
    with pytest.raises(ValueError, match=r"\(0, 0\) was generated twice"):
        read_samples(place / "samples.jsonl")


def test_a_sample_that_is_generated_anew_has_the_same_lengths(tmp_path: Path) -> None:
    file = write_run(tmp_path, "sync", 1, 4.0) / "samples.jsonl"
    first = json.loads(file.read_text().splitlines()[0])
    with file.open("a") as lines:
        lines.write(json.dumps(first) + "\n")
    assert len(read_samples(file, begins_again=True)) == len(file.read_text().splitlines()) - 1
    with file.open("a") as lines:
        lines.write(json.dumps(first | {"tokens": [1 + tokens for tokens in first["tokens"]]}) + "\n")
    with pytest.raises(ValueError, match=r"\(0, 0\) was generated twice"):
        read_samples(file, begins_again=True)


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    assert tail.read() == []
    with tail.path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert [line for _, line in tail.read()] == [b"one"]
        assert tail.read() == []
        file.write(b"o\nthree\n")
        assert [line for _, line in tail.read()] == [b"two", b"three"]
        assert tail.read() == []


def test_rounds_are_interleaved_and_turned_around() -> None:
    arms = arms_named(W3, ["sync", "colocate_async"])
    order = [(number, arm.name) for number, arm in command.interleaved(arms, 3)]
    assert order == [
        *((1, "sync"), (1, "colocate_async")),
        *((2, "colocate_async"), (2, "sync")),
        *((3, "sync"), (3, "colocate_async")),
    ]


def test_runs_of_other_settings_are_not_compared(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 12, "skip": 3, "set": {}}
    command.keep_settings(tmp_path, settings)
    command.keep_settings(tmp_path, settings)
    with pytest.raises(ConfigError, match="another --out"):
        command.keep_settings(tmp_path, settings | {"skip": 4})


def test_runs_of_another_machine_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"steps": 12, "skip": 3, "set": {}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    command.keep_settings(tmp_path, settings)  # of an earlier version, which did not write down the machine
    monkeypatch.setattr(command, "machine", lambda: {"processor": "another", "cores": 2})
    with pytest.raises(ConfigError, match="holds runs of another machine"):
        command.keep_settings(tmp_path, settings)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "w9"], "--workload='w9'"),
        (["--arms", "nothing"], "--arms='nothing'"),
        (["--set", "seed"], "--set='seed': has no value"),
        (["--steps", "3", "--skip", "3"], "--skip=3"),
        (["--rounds", "0"], "--rounds=0"),
        (["--workload", "w3", "--turn-s", "0"], "--turn-s=0"),
        (["--workload", "w3", "--turn-s", "1e9"], "--turn-s=1000000000"),
        (["--workload", "w1", "--turn-s", "1"], "w1 has no tools"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([*arguments, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_is_not_made_again(tmp_path: Path) -> None:
    write_run(tmp_path, "sync", 1, 4.0)
    (arm,) = arms_named(W3, ["sync"])
    plan = command.BenchPlan(W3, arm, STEPS, tmp_path / "data", tmp_path / "sync-r1", {})
    before = {file: file.read_bytes() for file in plan.folder.iterdir()}
    assert command.run_once(plan, 1, skip=1, timeout_s=0.0)
    assert {file: file.read_bytes() for file in plan.folder.iterdir()} == before


def test_the_defaults_name_arms_that_are_there() -> None:
    options: argparse.Namespace = command.make_parser().parse_args([])
    names = [arm.name for arm in arms_named(W3, options.arms.split(","))]
    assert len(names) == len(set(names)) == 12
