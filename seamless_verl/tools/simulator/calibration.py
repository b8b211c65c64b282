"""Fits a simulated machine and workload to what a run leaves, and reads and writes what was fitted as JSON.

A run leaves the metrics of its steps, and the rates that its lending policy saw (`lending.jsonl`). `metrics.jsonl` has
a line a step, {"step", "time", "metrics"}; verl's file logger writes {"step", "data"} instead.

- Training: least squares of the ledger's device-seconds of training, by tokens and sequences; tokens that shared
  prefixes saved do not count. Where the steps' tokens are too much alike to tell the two apart, all is ascribed to
  tokens.
- Engines: the seconds of a decoding step are a straight line in the calls that run, by least squares, of what the
  lending policy saw. Without that there is one point: all generated tokens over the ledger's device-seconds of
  generation, at the calls that a step has for each device.
- Lengths: lognormal, from the mean and the longest of each step. The longest of n draws is z(n) standard deviations of
  the logarithm above the median, so that longest / mean = exp(sigma z - sigma^2 / 2).
- The rest are medians of the steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, mean, median, pstdev
from typing import Any, TypeAlias

import msgspec
import numpy as np

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending.policy import Assignment, Decision, LendingView, Use
from seamless_verl.runtime.step_metrics import FILE as METRICS
from seamless_verl.tools.simulator.machine import MachineProfile
from seamless_verl.tools.simulator.scenario import SimulatedWorkload

RECORDING = "lending.jsonl"
Recorded: TypeAlias = tuple[LendingView, Decision]
DEVICE = "seamless/device/"
SAVED = "seamless/shared/tokens_saved"


@dataclass(frozen=True)
class RunMetrics:
    """The metrics of a run's steps in order, after the first `skipped`."""

    path: Path
    steps: tuple[int, ...]
    rows: tuple[Mapping[str, float], ...]
    skipped: int

    def values(self, name: str) -> list[float]:
        """A metric of every step. Raises ConfigError where a step lacks it, or has no number of 0 or more."""
        return [_checked(self.path, step, name, row.get(name)) for step, row in zip(self.steps, self.rows, strict=True)]

    def has(self, name: str) -> bool:
        return all(name in row for row in self.rows)

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the ledger's devices."""
        names = (key.removeprefix(DEVICE).split("/") for key in self.rows[0] if key.startswith(DEVICE))
        return tuple(dict.fromkeys(parts[0] for parts in names if parts[0].startswith(("train-", "rollout-"))))


def read_metrics(run: Path, *, skip: int, least: int) -> RunMetrics:
    """The metrics in a run's folder, or in a file of them.

    Raises ConfigError when there are none, a line is broken, or fewer than `least` steps remain after `skip`.
    """
    path = run / METRICS if run.is_dir() else run
    if not path.is_file():
        way_out = "Give the folder trainer.default_local_dir of a run, or its file of metrics"
        raise ConfigError("RUN", str(run), f"there is no {METRICS}", way_out)
    found: dict[int, dict[str, Any]] = {}
    try:
        texts = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it cannot be read as step metrics: {error}"
        raise ConfigError("RUN", str(path), reason, f"Give the folder of a run, or its {METRICS}") from error
    for number, text in enumerate(texts, 1):
        if not text.endswith("\n"):
            break  # a line that was being written when the run ended
        try:
            line = json.loads(text)
            step, metrics = int(line["step"]), dict(line["metrics"] if "metrics" in line else line["data"])
        except (ValueError, KeyError, TypeError) as error:
            way_out = 'Each line is {"step": 1, "time": ..., "metrics": {...}}: is it the file of a run?'
            raise ConfigError("RUN", f"{path}:{number}", "it is no line of step metrics", way_out) from error
        found[step] = found.get(step, {}) | metrics
    steps = sorted(step for step in found if step > 0)[skip:]
    if len(steps) < least:
        way_out = f"Run {least - len(steps)} more steps, or skip fewer"
        raise ConfigError("RUN", str(run), f"{len(steps)} steps after the first {skip} are too few for a fit", way_out)
    return RunMetrics(path, tuple(steps), tuple(found[step] for step in steps), skip)


def read_recording(file: Path) -> list[tuple[str, dict[str, Any], list[Recorded]]]:
    """For each start of the run: the lending policy's name and state, and its views with what was decided.

    Another policy, or the same, can decide them again.
    """
    starts: list[tuple[str, dict[str, Any], list[Recorded]]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "view" in row:
            decision = msgspec.convert(row["decision"], dict[str, Assignment])
            starts[-1][2].append((msgspec.convert(row["view"], LendingView), decision))
        else:
            starts.append((row["policy"], row["state"], []))
    return starts


def read_rates(run: Path) -> list[tuple[float, float]]:
    """(calls, tokens/s) of an engine, as its lending policy saw them between two looks; empty without a recording."""
    path = run / RECORDING
    if not path.is_file():
        return []
    points: list[tuple[float, float]] = []
    for _, _, recorded in read_recording(path):
        for (earlier, _), (later, _) in pairwise(recorded):
            before = {device.device_id: device for device in earlier.devices}
            for device in later.devices:
                both = (device, before[device.device_id])
                if device.rate > 0 and all(one.use is Use.ROLLOUT and one.running for one in both):
                    points.append((sum(one.running for one in both) / 2, device.rate))
    return points


def _checked(path: Path, step: int, name: str, value: object) -> float:
    if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
        return float(value)
    if value is None:
        way_out = "Take a run of trainer.v1.trainer_mode=seamless, or skip the steps without it"
        raise ConfigError(name, value, f"step {step} of {path} does not have it", way_out)
    way_out = "The run's clock or its file is broken: skip that step with --skip, or take another run"
    raise ConfigError(name, value, f"step {step} of {path} has a value that cannot be", way_out)


FORMAT = 1
LEAST_STEPS = 5
LEAST_POINTS = 8  # of engines' rates, in at least two sizes of a batch
SPREAD = 0.05  # relative, of the tokens of steps: below it tokens and sequences cannot be told apart
ASSUMED = ("prefill_token_s", "dispatch_s", "call_s", "collect_s", "host_token_s", "host_sample_s", "train_sync_s")
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class RatesSource(StrEnum):
    """Where the engines' rates are from."""

    SEEN = "seen by the lending policy"
    """between two looks, beside everything else"""
    MEAN = "the mean of the ledger"
    """one rate, which fewer calls are taken to share"""


@dataclass(frozen=True)
class Calibration:
    """What was fitted; a run's constants, and how well they fit."""

    machine: MachineProfile
    workload: SimulatedWorkload
    seats: int
    steps: int
    skipped: int
    training_devices: int
    devices: int
    engine_source: RatesSource
    residuals: Mapping[str, float]
    """relative: of a fit the root mean square, of a median the median distance from it, of the ledger's mean rate the
    standard deviation of the steps' rates"""
    measured: Mapping[str, float]  # the run's seconds of a step, tokens/s with prompts, idle share
    assumed: tuple[str, ...] = ASSUMED  # of the machine: what a run does not show stays as it is

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2)


def fit(run: RunMetrics, points: Sequence[tuple[float, float]], *, samples: int = 1, updates: int = 1) -> Calibration:
    """The constants of a run; `points` are (calls, tokens/s) of an engine, as its lending policy saw them.

    A prompt has so many `samples`, and a step so many `updates`. Raises ConfigError for metrics that are missing or
    cannot be.
    """
    tokens, rows = run.values("perf/total_num_tokens"), _rows(run)
    shares = run.has(SAVED)
    saved = run.values(SAVED) if shares else [0.0] * len(tokens)
    computed = [total * (1 - share) for total, share in zip(tokens, saved, strict=True)]
    training, train_residual = fit_training(computed, rows, run.values("seamless/device/train_s"))
    generates = sum(1 for device in run.devices if any(run.values(f"seamless/device/{device}/rollout_share")))
    seats = max(1, round(median(rows) / max(1, generates)))
    seen = len(points) >= LEAST_POINTS
    if seen:
        rates, rate_residual = fit_rates(points)
    else:  # one point is fitted without any residual, whatever it says
        generation = _generation(run)
        mean_rate = sum(tokens for tokens, _ in generation) / sum(seconds for _, seconds in generation)
        rates, _ = fit_rates([(seats, mean_rate)])
        rate_residual = _spread_of([tokens / seconds for tokens, seconds in generation if seconds])
    times = {
        "switch_to_train_s": run.values("lending/switch_s"),
        "sync_s": run.values("timing_s/update_weights"),
        "load_s": run.values("seamless/commit/standstill_max_s"),
        "host_s": [other / updates for other in _other_s(run)],
    }
    lend = "lending/return_s" if run.has("lending/return_s") else "lending/switch_s"
    times["switch_to_rollout_s"] = run.values(lend)
    machine = MachineProfile(
        rates=rates,
        train_token_s=training[0],
        train_row_s=training[1],
        shares_prompts=shares,
        **{name: median(values) for name, values in times.items()},
    )
    steps = run.values("timing_s/step")
    return Calibration(
        machine=machine,
        workload=_workload(run, rows, samples),
        seats=seats,
        steps=len(run.steps),
        skipped=run.skipped,
        training_devices=sum(1 for device in run.devices if device.startswith("train-")),
        devices=len(run.devices),
        engine_source=RatesSource.SEEN if seen else RatesSource.MEAN,
        residuals={"train": train_residual, "rates": rate_residual, **{n: _spread(v) for n, v in times.items()}},
        measured={
            "step_s": median(steps),
            "tokens_per_s": sum(tokens) / sum(steps),
            "idle_share": mean(run.values("seamless/device/idle_share")),
        },
    )


def fit_training(
    tokens: Sequence[float], rows: Sequence[int], seconds: Sequence[float]
) -> tuple[tuple[float, float], float]:
    """Device-seconds per token and per sequence, neither negative, and the relative residual."""
    work, times = np.column_stack((tokens, rows)).astype(float), np.asarray(seconds, float)
    found = np.array([times @ work[:, 0] / (work[:, 0] @ work[:, 0]), 0.0])
    products = work.T @ work
    if _spread_of(tokens) >= SPREAD and np.linalg.det(products) > 1e-9 * products[0, 0] * products[1, 1]:
        both = np.linalg.solve(products, work.T @ times)
        found = both if min(both) >= 0 else found
    return (float(found[0]), float(found[1])), _rms(times, work @ found)


def fit_rates(points: Sequence[tuple[float, float]]) -> tuple[dict[int, float], float]:
    """Tokens/s by calls from a decoding step of a + b x calls seconds, neither negative, and the relative residual.

    One point says nothing of b: a step then takes as long for fewer calls.
    """
    calls, rates = np.array(points, float).T
    seconds, most = calls / rates, float(max(calls))
    apart = calls - calls.mean()
    slope = max(0.0, float(apart @ seconds / (apart @ apart))) if apart.any() else 0.0
    fixed = float(seconds.mean() - slope * calls.mean())
    if fixed <= 0:
        fixed, slope = 1e-9, float(calls @ seconds / (calls @ calls))
    sizes = sorted({1, *(size for size in SIZES if size < most), max(2, round(most))})
    return {size: size / (fixed + slope * size) for size in sizes}, _rms(seconds, fixed + slope * calls)


def sigma_of(longest_to_mean: float, draws: int) -> float:
    """The standard deviation of the logarithm at which the longest of so many draws is that many times their mean."""
    z = NormalDist().inv_cdf(0.5 ** (1 / max(2, draws)))
    return z - math.sqrt(max(0.0, z * z - 2 * math.log(max(1.0, longest_to_mean))))


def read_calibration(path: Path) -> Calibration:
    """Raises ConfigError for a file that is none, or of another format."""
    try:
        values = msgspec.json.decode(path.read_bytes())
        if values["format"] != FORMAT:
            raise ConfigError("--calibration", str(path), f"its format is not {FORMAT}", "Calibrate again")
        return msgspec.convert(values, Calibration, str_keys=True)
    except (OSError, KeyError, TypeError, msgspec.MsgspecError) as error:
        way_out = "Give a file that `seamless-verl calibrate` wrote"
        raise ConfigError("--calibration", str(path), f"it is no calibration ({error})", way_out) from error


def _rows(run: RunMetrics) -> list[int]:
    """Sequences of each step."""
    lengths = zip(run.values("prompt_length/mean"), run.values("response_length/mean"), strict=True)
    tokens = run.values("perf/total_num_tokens")
    means = [max(1.0, prompt + reply) for prompt, reply in lengths]
    return [max(1, round(total / one)) for total, one in zip(tokens, means, strict=True)]


def _generation(run: RunMetrics) -> list[tuple[float, float]]:
    """Generated tokens, and device-seconds of generation, of each step but the first. ConfigError without any."""
    generated = [max(0.0, after - before) for before, after in pairwise(run.values("calls/tokens"))]
    seconds = run.values("seamless/device/rollout_s")[1:]
    if not (sum(generated) and sum(seconds)):
        way_out = "Take a run in which agents make calls"
        raise ConfigError("calls/tokens", sum(generated), f"{run.path} has no generation in its steps", way_out)
    return list(zip(generated, seconds, strict=True))


def _other_s(run: RunMetrics) -> list[float]:
    """Of each step what is neither waiting for samples, nor training, nor a weight update."""
    parts = [run.values(f"timing_s/{name}") for name in ("step", "gen", "update_actor", "update_weights")]
    return [max(0.0, step - sum(others)) for step, *others in zip(*parts, strict=True)]


def _workload(run: RunMetrics, rows: Sequence[int], samples: int) -> SimulatedWorkload:
    count, lengths = round(median(rows)), run.values("response_length/mean")
    longest = run.values("response_length/max")
    if count % samples:
        way_out = "Give the run's actor_rollout_ref.rollout.n"
        raise ConfigError("--samples", samples, f"a step of it has {count} sequences", way_out)
    sigma = sigma_of(median(most / max(1.0, length) for most, length in zip(longest, lengths, strict=True)), count)
    return SimulatedWorkload(
        prompts=count // samples,
        samples=samples,
        median=max(1.0, mean(lengths)) / math.exp(sigma**2 / 2),
        sigma=sigma,
        cap=round(max(longest)),
        prompt_tokens=round(mean(run.values("prompt_length/mean"))),
    )


def _rms(measured: np.ndarray, fitted: np.ndarray) -> float:
    """Root mean square of what is left, relative to the mean."""
    return float(np.sqrt(np.mean((measured - fitted) ** 2)) / measured.mean()) if measured.any() else 0.0


def _spread_of(values: Sequence[float]) -> float:
    return pstdev(values) / mean(values) if any(values) else 0.0


def _spread(values: Sequence[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values) / middle if middle else 0.0
