"""What holds of a workload's runs alone: their tokens, the bound by hand, whether they did the same work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.comparison import comparison

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare import engine_baseline
from seamless_verl.tools.compare.engine_baseline import with_data
from seamless_verl.tools.compare.forced_work import (
    SampleRecord,
    WorkedRun,
    budget_of,
    differences,
    forced_work,
    rate_of,
    read_samples,
)
from seamless_verl.tools.compare.job import Options, job_named
from seamless_verl.tools.compare.page import markdown, page
from seamless_verl.tools.compare.workloads import LOOPS_FILE, WORKLOADS, Lognormal, Workload

EVEN = Workload("even", "ten tokens each", Lognormal(10, 0.0), longest=10, prompts=2, samples=2, seats=4)
TALKS = replace(EVEN, turns=3, tool=Lognormal(1.0, 0.0), tool_tokens=5)
RATES = {32: 4000.0, 64: 6000.0}


def step(at: float, mean: float = 10.0, **data: float) -> dict[str, Any]:
    return {"at": at, "step": 0, "data": {"response_length/mean": mean, **data}}


def worked(arm: str, seconds: float, *, update: float = 0.5, prompt: int = 7, tokens: int = 10) -> WorkedRun:
    """Three steps of a run of TALKS, which trains on one device."""
    row = {"timing_s/update_actor": update, "perf/total_num_tokens": 50.0}
    samples = {(n // 2, n % 2): SampleRecord((1,) * prompt, (tokens,) * 3, (0.5,) * 3) for n in range(12)}
    steps = [step(60 + n * seconds, 40.0, **row) for n in range(3)]
    return WorkedRun(arm, f"{arm}-seed1-r1", steps, samples, trains=1)


def test_generated_tokens_a_second_are_between_the_ends_of_steps() -> None:
    """The first of five is left out: 4 steps of 4 samples of 10 tokens, from second 100 to 112."""
    assert rate_of(EVEN, [step(at) for at in (100, 102, 104, 111, 112)], 1) == pytest.approx(160 / 12)
    later = [step(100, 50), step(101, 50), step(105, 10), step(106, 20)]
    assert rate_of(EVEN, later, 2) == pytest.approx(4 * (10 + 20) / 5)


def test_what_tools_answered_was_not_generated_and_the_budget_is_that_of_the_data_sets_order() -> None:
    assert rate_of(TALKS, [step(1, 40.0), step(2, 40.0)], 1) == 4 * 40 - 40
    assert budget_of(TALKS, [step(1, 40.0), step(2, 40.0)]) == 1.0
    assert budget_of(EVEN, [step(1, 8.0), step(2, 11.0), step(3, 8.0)]) == pytest.approx(27 / 30)


def test_the_bound_by_hand() -> None:
    """4 samples x 3 turns x 10 tokens generated; with 40 of tools and 4 x 7 of prompts, 188 trained, as the fastest."""
    work = forced_work(TALKS, [worked("sync", 4.0), worked("seamless", 2.0, update=0.25)], {1: 5.0, 4: 60.0}, 1)
    limit = work.bound
    assert limit is not None and (limit.generated, limit.generate_s) == (120, 2.0)
    assert limit.update_s == pytest.approx(188 * 0.25 / 50) and limit.step_s == pytest.approx((2.0 + 0.94) / 2)
    assert limit.tokens_per_s == pytest.approx(120 / 1.47)
    assert {arm: rate.median for arm, rate in work.rates.items()} == {"sync": 30.0, "seamless": 60.0}
    assert forced_work(TALKS, [worked("sync", 4.0)], {1: 5.0}, 1).bound is None, "no rate of full seats"


def test_the_report_has_the_bound_and_that_the_work_was_the_same() -> None:
    work = forced_work(TALKS, [worked("sync", 4.0), worked("seamless", 2.0)], {4: 60.0}, 1)
    one = replace(comparison(), forced_work=work)
    share = f"{60.0 / work.bound.tokens_per_s:.0%}" if work.bound else ""
    for text in (markdown(one), page(one)):
        assert "The same prompts and lengths in all runs; 12 samples are in every one." in text
        assert "a tool's work 1.00 s" in text.replace("&#39;", "'") and share in text
    assert f"| seamless | 60 | 1.000 | {share} |" in markdown(one)


def test_a_run_that_did_other_work_is_named() -> None:
    work = forced_work(TALKS, [worked("sync", 4.0), worked("seamless", 2.0, tokens=9)], {}, 1)
    assert work.unequal[0] == "seamless-seed1-r1 differs from sync-seed1-r1 at prompt 0, sample 0"
    assert "NOT THE SAME WORK:" in work.lines and len(work.lines) == 12, "ten of them"


def write_samples(file: Path) -> dict[str, Any]:
    """The samples of `w3` in the data set's order; returns the first line."""
    w3 = WORKLOADS["w3"]
    lines = [
        {
            "index": index,
            "session": session,
            "prompt": [1, 2],
            "tokens": [turn.tokens for turn in w3.sample(index, session)],
            "seconds": [0.5] * 4,
        }
        for index in range(48)
        for session in range(w3.samples)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines[0]


def test_samples_by_place(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    first = write_samples(file)
    samples = read_samples(file)
    assert samples[5, 2].tokens == tuple(turn.tokens for turn in WORKLOADS["w3"].sample(5, 2))
    other = {**samples, (5, 2): samples[5, 3]}
    assert differences({"one": samples, "two": other}) == ["two differs from one at prompt 5, sample 2"]
    with file.open("a") as lines:
        lines.write(json.dumps(first) + "\n")
    with pytest.raises(ValueError, match=r"\(0, 0\) was generated twice"):
        read_samples(file)


def test_a_sample_that_is_generated_anew_has_the_same_lengths(tmp_path: Path) -> None:
    file = tmp_path / "samples.jsonl"
    first = write_samples(file)
    with file.open("a") as lines:
        lines.write(json.dumps(first) + "\n")
    assert len(read_samples(file, begins_again=True)) == len(file.read_text().splitlines()) - 1
    with file.open("a") as lines:
        lines.write(json.dumps(first | {"tokens": [1 + tokens for tokens in first["tokens"]]}) + "\n")
    with pytest.raises(ValueError, match=r"\(0, 0\) was generated twice"):
        read_samples(file, begins_again=True)


@pytest.mark.parametrize(("name", "bound", "measured"), [("w1", False, 0), ("w1", True, 1), ("w3", False, 1)])
def test_an_engine_is_measured_where_it_must_be(
    name: str, bound: bool, measured: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    monkeypatch.setattr(
        engine_baseline, "measured_rates", lambda workload, data, timeout_s: calls.append(workload.name) or RATES
    )
    monkeypatch.setattr(engine_baseline, "make_data", lambda workload, steps, folder: folder.mkdir())
    made = with_data(job_named(name, ["a=1"], tmp_path), Options(steps=12, bound=bound))
    w3, expected = WORKLOADS["w3"], WORKLOADS[name]
    assert made.workload == (w3.with_turn(w3.turn_s(RATES)) if name == "w3" else expected) and len(calls) == measured
    (loop,) = json.loads((tmp_path / "data" / LOOPS_FILE).read_text())
    assert loop["workload"] == name and loop.get("turn_s") == (
        pytest.approx(w3.turn_s(RATES)) if name == "w3" else None
    )
    assert made.overrides[-1] == "a=1", "after ours, so that hydra takes it"


def test_without_a_measure_a_tool_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_baseline, "measured_rates", lambda *places: {})
    monkeypatch.setattr(engine_baseline, "make_data", lambda *places: None)
    with pytest.raises(ConfigError, match="the engine could not be measured alone"):
        with_data(job_named("w3", [], tmp_path), Options(steps=12))


def test_a_workload_is_not_validated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--validate=5: the lengths"):
        with_data(job_named("w2", [], tmp_path), Options(steps=15, validate=5))
