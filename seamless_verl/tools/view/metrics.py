"""The charts over steps: the metrics of a run as its file grows, which of them each chart shows, and their values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from seamless_verl.resources.ledger.activity import DeviceUse
from seamless_verl.runtime.files import whole_rows
from seamless_verl.runtime.step_metrics import CORE, FILE, StepRow, add_row, reward_metrics

MAX_POINTS = 2000  # steps of a chart


@dataclass(frozen=True)
class Chart:
    """A chart: `lines` are (metric, label); `about` says what to see in it.

    `of_use`: the labels are kinds of a device's use, and have the colours that the devices' lanes have for these.
    """

    key: str
    title: str
    unit: str
    about: str
    lines: tuple[tuple[str, str], ...]
    of_use: bool = False


CHARTS = (
    Chart(
        "reward",
        "Reward",
        "",
        "of the sessions that the step trained",
        (("critic/score/mean", "mean"), ("critic/score/max", "highest"), ("critic/score/min", "lowest")),
    ),
    Chart(
        "throughput",
        "Throughput",
        "tokens/s",
        "tokens of the batch, prompts included, by the step's time",
        (("perf/throughput", "a device"),),
    ),
    Chart(
        "idle",
        "Device time",
        "share",
        "what all devices did in the step",
        tuple((f"seamless/device/{kind}_share", str(kind)) for kind in DeviceUse),
        of_use=True,
    ),
    Chart(
        "queue",
        "Queue",
        "",
        "at the end of the step",
        (
            ("fleet/waiting", "calls that wait for a replica"),
            ("calls/running", "calls that run"),
            ("runner_tasks/queued", "tasks that no runner has"),
            ("seamless/ahead", "steps' worth of prompts ahead"),
        ),
    ),
    Chart(
        "staleness",
        "Staleness",
        "versions",
        "how many versions behind the trainer the step's tokens are",
        (
            ("training/off_policy/trajectory_staleness/mean", "mean"),
            ("training/off_policy/trajectory_staleness_worst/max", "oldest token"),
        ),
    ),
    Chart(
        "agreement",
        "Logprobs, trainer to rollout",
        "nats",
        "with algorithm.rollout_correction.bypass_mode, of the first mini-batch of each update",
        (
            ("seamless/agreement/plain/mean", "mean |difference|"),
            ("seamless/agreement/grammar/mean", "of tokens under a grammar"),
            ("rollout_corr/log_ppl_abs_diff", "log perplexity"),
        ),
    ),
    Chart(
        "seconds",
        "Time of a step",
        "s",
        "as the trainer measured it",
        (
            ("timing_s/step", "whole step"),
            ("timing_s/gen", "waiting for groups"),
            ("timing_s/update_actor", "update"),
            ("timing_s/update_weights", "weights"),
        ),
    ),
)


@dataclass(frozen=True)
class Series:
    """Values by step, None where a step has none; `times` are when steps ended, in seconds since the epoch.

    `charts` are those of which the run has any metric, `names` all metrics it has. Of a long run every `every`-th step
    is there, and the last one.
    """

    charts: tuple[Chart, ...]
    names: tuple[str, ...]
    every: int
    steps: list[int]
    times: list[float]
    values: dict[str, list[float | None]]


def read_series(steps: Sequence[StepRow], names: Sequence[str], extra: Sequence[str] = ()) -> Series:
    """The series of all charts, and of `extra` metrics; `names` are those of all metrics of the steps."""
    known = set(names)
    charts = tuple(chart for chart in CHARTS if any(name in known for name, _ in chart.lines))
    # what stands for a validation: each data source's mean reward; else a core metric
    validations = reward_metrics(names) or sorted(name for name in names if name.startswith(f"{CORE}/"))[:1]
    if validations:
        line = Chart("validation", "Validation", "", "after the step", tuple((name, name) for name in validations))
        charts = (*charts[:1], line, *charts[1:])
    wanted = dict.fromkeys([name for chart in charts for name, _ in chart.lines] + list(extra))
    every = -(-len(steps) // MAX_POINTS) or 1
    shown = steps[::-1][::every][::-1]
    values = {name: [one.number(name) for one in shown] for name in wanted if name in known}
    return Series(charts, tuple(names), every, [one.step for one in shown], [one.time for one in shown], values)


def numbers_of(row: StepRow) -> dict[str, float]:
    """The step's metrics that are numbers."""
    return {name: number for name in row.metrics if (number := row.number(name)) is not None}


class MetricsReader:
    """Reads the metrics of the run in `folder` as their file grows: only what was appended since the last call."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._clear(0)

    def _clear(self, inode: int) -> None:
        self._offset, self._inode = 0, inode
        self._rows: dict[int, StepRow] = {}
        self._names: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The metrics that are numbers, of all steps read, in alphabetical order."""
        return sorted(self._names)

    def steps(self) -> list[StepRow]:
        """All steps in order, each once: of several lines of a step the later value of a metric counts.

        A file that a resumed run has cut is read anew. Lines that are no metrics are left out.
        """
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_size < self._offset or stat.st_ino != self._inode:
                    self._clear(stat.st_ino)
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._add(line)
        except FileNotFoundError:
            self._clear(0)
        return [self._rows[step] for step in sorted(self._rows)]

    def _add(self, line: bytes) -> None:
        try:
            (values,) = whole_rows([line.decode()])
            row = StepRow(values["step"], values["time"], values["metrics"])
        except (ValueError, LookupError, TypeError):
            return  # of another program, or of a disk that was full
        if type(row.step) is not int or not isinstance(row.time, int | float) or not isinstance(row.metrics, dict):
            return
        self._names.update(numbers_of(row))
        add_row(self._rows, row)
