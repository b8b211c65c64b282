"""A calibration finds the constants that a run was made with, and refuses a run that says too little or cannot be."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lending import view

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending import RecordedPolicy
from seamless_verl.resources.lending.marginal import Marginal
from seamless_verl.resources.lending.policy import DeviceView, Use
from seamless_verl.tools.simulator.calibration import (
    RatesSource,
    fit,
    fit_rates,
    fit_training,
    read_calibration,
    read_metrics,
    read_rates,
    sigma_of,
)
from seamless_verl.tools.simulator.scenario import SimulatedWorkload

WORKLOAD = SimulatedWorkload(prompts=16, samples=4, median=60, sigma=0.8, cap=4000, prompt_tokens=10)
TOKEN_S, ROW_S, RATE = 0.25e-3, 7e-3, 2000.0


def step_metrics(step: int, *, generated_before: float = 0.0) -> dict[str, float]:
    """Of a step of `WORKLOAD` on two devices of which one trains; the tokens are drawn."""
    lengths = [turn.tokens for n in range(16) for (turn,) in WORKLOAD.group(7, step * 16 + n)]
    total = sum(lengths) + 64 * 10
    train_s = TOKEN_S * total + ROW_S * 64
    return {
        "perf/total_num_tokens": total,
        "prompt_length/mean": 10,
        "response_length/mean": sum(lengths) / 64,
        "response_length/max": max(lengths),
        "calls/tokens": generated_before + sum(lengths),
        "timing_s/step": train_s + 0.3,
        "timing_s/gen": 0.1,
        "timing_s/update_actor": train_s,
        "timing_s/update_weights": 0.08,
        "lending/switch_s": 0.03,
        "seamless/commit/standstill_max_s": 0.02,
        "seamless/device/train_s": train_s,
        "seamless/device/rollout_s": sum(lengths) / RATE,
        "seamless/device/idle_share": 0.1,
        "seamless/device/train-0/rollout_share": 0.0,
        "seamless/device/rollout-0/rollout_share": 0.7,
    }


def write_run(folder: Path, *, steps: int = 12, key: str = "metrics", **changed: Any) -> Path:
    """A run's folder; `changed` are the values of the metrics of step 5."""
    rows, generated = list[str](), 0.0
    for step in range(1, steps + 1):
        metrics: dict[str, Any] = step_metrics(step, generated_before=generated)
        generated = metrics["calls/tokens"]
        if step == 5:
            metrics = {name: value for name, value in {**metrics, **changed}.items() if value is not None}
        rows.append(json.dumps({"step": step, "time": 1e9 + step, key: metrics}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(rows))
    return folder


@pytest.mark.parametrize("key", ["metrics", "data"])
def test_the_constants_of_a_run_are_found(tmp_path: Path, key: str) -> None:
    found = fit(read_metrics(write_run(tmp_path, key=key), skip=2, least=5), [], samples=4, updates=2)
    machine = found.machine
    assert (found.steps, found.skipped, found.devices, found.training_devices) == (10, 2, 2, 1)
    assert (machine.train_token_s, machine.train_row_s) == pytest.approx((TOKEN_S, ROW_S), rel=1e-6)
    assert (machine.sync_s, machine.load_s, machine.switch_to_train_s) == (0.08, 0.02, 0.03)
    assert machine.switch_to_rollout_s == 0.03
    assert machine.host_s == pytest.approx((0.3 - 0.1 - 0.08) / 2)
    assert found.engine_source is RatesSource.MEAN
    assert machine.rate(found.seats) == pytest.approx(RATE)
    assert machine.rate(1) == pytest.approx(RATE / 64)
    assert found.residuals["train"] < 1e-6
    assert (found.workload.prompts, found.workload.samples, found.workload.prompt_tokens) == (16, 4, 10)
    assert found.workload.sigma == pytest.approx(WORKLOAD.sigma, rel=0.2)
    assert found.workload.median == pytest.approx(WORKLOAD.median, rel=0.2)
    assert "dispatch_s" in found.assumed


def test_noise_shows_in_the_residuals(tmp_path: Path) -> None:
    folder = write_run(tmp_path, steps=30)
    draw, lines = Random(1), list[str]()
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        row["metrics"]["seamless/device/train_s"] *= 1 + draw.gauss(0, 0.1)
        lines.append(json.dumps(row) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    found = fit(read_metrics(folder, skip=2, least=5), [], samples=4)
    assert 0.05 < found.residuals["train"] < 0.15
    assert found.machine.train_s(5000, 64, 0) == pytest.approx(TOKEN_S * 5000 + ROW_S * 64, rel=0.1)


def test_steps_that_are_alike_say_nothing_of_sequences() -> None:
    (token_s, row_s), residual = fit_training([1000, 1001, 999], [10, 10, 10], [2.0, 2.0, 2.0])
    assert (token_s, row_s) == (pytest.approx(2e-3, rel=1e-3), 0.0)
    assert residual < 0.01


def test_no_cost_is_negative() -> None:
    (token_s, row_s), _ = fit_training([1000, 2000, 3000], [10, 10, 10], [1.0, 2.5, 4.0])
    assert token_s > 0 and row_s == 0
    rates, _ = fit_rates([(1, 10.0), (32, 3200.0)])
    assert all(rate > 0 and math.isfinite(rate) for rate in rates.values())


@given(st.floats(1e-4, 1e-2), st.floats(1e-6, 1e-3))
def test_an_engines_rates_are_found_again(fixed: float, slope: float) -> None:
    rates, residual = fit_rates([(c, c / (fixed + slope * c)) for c in (1, 3, 8, 20, 64)])
    assert rates[64] == pytest.approx(64 / (fixed + slope * 64), rel=1e-6)
    assert rates[2] == pytest.approx(2 / (fixed + slope * 2), rel=1e-6)
    assert residual < 1e-6


@given(st.floats(0.1, 1.5), st.integers(16, 4096))
def test_sigma_is_what_the_longest_says(sigma: float, draws: int) -> None:
    from statistics import NormalDist

    z = NormalDist().inv_cdf(0.5 ** (1 / draws))
    assert sigma_of(math.exp(sigma * z - sigma**2 / 2), draws) == pytest.approx(min(sigma, 2 * z - sigma), abs=1e-6)


def test_what_the_lending_policy_saw_is_used_where_it_saw_enough(tmp_path: Path) -> None:
    policy = RecordedPolicy(Marginal(), "marginal", tmp_path / "lending.jsonl")
    for i in range(20):
        calls = 4 + i % 5
        shown = view("BB", now=float(i))
        devices = tuple(replace(d, use=Use.ROLLOUT, running=calls, rate=calls / 0.01) for d in shown.devices)
        policy.decide(replace(shown, devices=devices))
    points = read_rates(tmp_path)
    assert len(points) == 38
    assert isinstance(view("B").devices[0], DeviceView)
    found = fit(read_metrics(write_run(tmp_path), skip=2, least=5), points, samples=4)
    assert found.engine_source is RatesSource.SEEN
    assert found.machine.rate(4) == pytest.approx(400, rel=0.15)
    assert read_rates(tmp_path / "elsewhere") == []


def test_a_calibration_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = fit(read_metrics(write_run(tmp_path), skip=2, least=5), [], samples=4)
    (tmp_path / "c.json").write_text(found.to_json())
    assert read_calibration(tmp_path / "c.json") == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9}', '{"format": 1, "machine": 3}'])
def test_what_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match="--calibration"):
        read_calibration(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seamless/device/train_s": -1.0}, "seamless/device/train_s=-1.0: step 5"),
        ({"timing_s/step": None}, "timing_s/step=None: step 5"),
        ({"timing_s/update_weights": float("nan")}, "timing_s/update_weights=nan: step 5"),
        ({"response_length/max": "long"}, "response_length/max='long': step 5"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_step(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        fit(read_metrics(write_run(tmp_path, **changed), skip=2, least=5), [], samples=4)


def test_a_run_that_is_too_short_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 steps after the first 2 are too few.*Run 1 more"):
        read_metrics(write_run(tmp_path, steps=6), skip=2, least=5)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RUN"):
        read_metrics(tmp_path, skip=0, least=1)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError, match=r"metrics.jsonl:1"):
        read_metrics(tmp_path, skip=0, least=1)


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "metr')
    assert read_metrics(folder, skip=2, least=5).steps[-1] == 12


def test_the_samples_of_a_prompt_must_divide_a_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--samples=5"):
        fit(read_metrics(write_run(tmp_path), skip=2, least=5), [], samples=5)


def test_tokens_that_shared_prefixes_saved_do_not_count_in_the_time_of_a_token(tmp_path: Path) -> None:
    """Of half the tokens saved, a computed token takes twice as long."""
    plain = fit(read_metrics(write_run(tmp_path), skip=2, least=5), [], samples=4).machine
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["metrics"]["seamless/shared/tokens_saved"] = 0.5
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shared = fit(read_metrics(tmp_path, skip=2, least=5), [], samples=4).machine
    assert (plain.shares_prompts, shared.shares_prompts) == (False, True)
    assert shared.train_s(5000, 64, 2500) == pytest.approx(plain.train_s(5000, 64, 2500))
