"""Reads what a run leaves for a calibration: the metrics of its steps, and the rates that its lending policy saw.

`metrics.jsonl` has a line a step, {"step", "time", "metrics"}; verl's file logger writes {"step", "data"} instead.
Every number that a fit needs is checked here: one that is missing, negative or not finite is refused with its step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending.policy import Use
from seamless_verl.runtime.step_metrics import FILE as METRICS
from seamless_verl.tools.simulator.recording import read_recording

RECORDING = "lending.jsonl"
DEVICE = "seamless/device/"


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
    for step, metrics in _lines(path):
        found[step] = found.get(step, {}) | metrics
    steps = sorted(step for step in found if step > 0)[skip:]
    if len(steps) < least:
        way_out = f"Run {least - len(steps)} more steps, or skip fewer"
        raise ConfigError("RUN", str(run), f"{len(steps)} steps after the first {skip} are too few for a fit", way_out)
    return RunMetrics(path, tuple(steps), tuple(found[step] for step in steps), skip)


def read_rates(run: Path) -> list[tuple[float, float]]:
    """(calls, tokens/s) of an engine, as its lending policy saw them between two looks; empty without a recording."""
    path = run / RECORDING
    if not path.is_file():
        return []
    points: list[tuple[float, float]] = []
    for _, _, recorded in read_recording(path):
        views = [view for view, _ in recorded]
        for earlier, later in pairwise(views):
            before = {device.device_id: device for device in earlier.devices}
            for device in later.devices:
                calls = (device.running + before[device.device_id].running) / 2
                generated = device.use is Use.ROLLOUT and before[device.device_id].use is Use.ROLLOUT
                if generated and device.running and before[device.device_id].running and device.rate > 0:
                    points.append((calls, device.rate))
    return points


def read_rates_file(path: Path) -> dict[int, float]:
    """Tokens/s by calls from a file of {"32": 7014, ...}. Raises ConfigError for anything else."""
    way_out = 'Give JSON such as {"1": 475, "32": 7014}, as the training bench leaves it in rates.json'
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        rates = {int(calls): float(rate) for calls, rate in given.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError("--rates", str(path), f"it has no rates ({type(error).__name__})", way_out) from error
    if len(rates) < 2 or not all(calls > 0 and math.isfinite(rate) and rate > 0 for calls, rate in rates.items()):
        raise ConfigError("--rates", str(path), "it takes two or more positive rates", way_out)
    return rates


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        texts: Sequence[str] = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it cannot be read as step metrics: {error}"
        raise ConfigError("RUN", str(path), reason, f"Give the folder of a run, or its {METRICS}") from error
    for number, text in enumerate(texts, 1):
        if not text.endswith("\n"):
            return  # a line that was being written when the run ended
        try:
            line = json.loads(text)
            step, metrics = int(line["step"]), dict(line["metrics"] if "metrics" in line else line["data"])
        except (ValueError, KeyError, TypeError) as error:
            way_out = 'Each line is {"step": 1, "time": ..., "metrics": {...}}: is it the file of a run?'
            raise ConfigError("RUN", f"{path}:{number}", "it is no line of step metrics", way_out) from error
        yield step, metrics


def _checked(path: Path, step: int, name: str, value: object) -> float:
    if isinstance(value, int | float) and math.isfinite(value) and value >= 0:
        return float(value)
    if value is None:
        way_out = "Take a run of trainer.v1.trainer_mode=seamless, or skip the steps without it"
        raise ConfigError(name, value, f"step {step} of {path} does not have it", way_out)
    way_out = "The run's clock or its file is broken: skip that step with --skip, or take another run"
    raise ConfigError(name, value, f"step {step} of {path} has a value that cannot be", way_out)
