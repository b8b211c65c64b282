"""The step metrics of a run: the file `metrics.jsonl` beside its checkpoints, one JSON object a line.

    {"step": 12, "time": 1764000000.123, "metrics": {"critic/score/mean": 0.25, ...}}

`time` is in seconds since 1970, when the step ended. Metrics are what verl's loggers get: numbers, null for one
that is not finite, text for anything else. A step may have two lines, as with a checkpoint, before which what is known
is written; read together, the later value of a metric counts. A validation beside training is in the line of the step
in which it ended, and is read with that whose weights it had.

What commands count in them stands here too: response tokens, and the reward of a validation. verl names a metric of it
`val-core/<data source>/<variable>/mean@<n>`, n being the samples of a prompt, or `val-aux/...`. `reward` is there for
every source: core unless the source has `acc`, and with the most samples. The reward of a validation is the mean over
the sources, in which each counts alike, however many prompts it has.

Invariants: each line is written whole and flushed at once, in the order of steps; a resumed run continues the file
after dropping what lies beyond its checkpoint.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from statistics import mean
from typing import Any

from seamless_verl.runtime.files import JsonLines, whole_rows

FILE = "metrics.jsonl"
TOKENS, RESPONSE, PROMPT = "perf/total_num_tokens", "response_length/mean", "prompt_length/mean"
COUNTED = "response tokens that were trained, tools' answers included and prompts not"
REWARD = re.compile(r"(?P<section>val[\w-]*)/(?:(?P<source>.+)/)?reward/mean@(?P<samples>\d+)")
CORE = "val-core"
VALIDATED = "seamless/validation/step"  # of a validation beside training: the step whose weights it had
OF_VALIDATION = ("val-", "seamless/validation/")


@dataclass(frozen=True)
class StepRow:
    """The metrics of `step`, which ended at `time`, in seconds since 1970."""

    step: int
    time: float
    metrics: Mapping[str, object] = field(default_factory=dict)

    def number(self, name: str) -> float | None:
        """A metric as a number; None when the step does not have it, or it is not finite."""
        value = self.metrics.get(name)
        return float(value) if isinstance(value, int | float) else None


class StepMetrics:
    """The file of one run, at `path`; `latest` has the last number of each metric that this process added."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, JsonLines(path)
        self.latest: dict[str, float] = {}

    @classmethod
    def beside(cls, checkpoints: str) -> StepMetrics:
        return cls(Path(checkpoints) / FILE)

    def add(self, step: int, metrics: Mapping[str, object]) -> None:
        """Appends the line of a step that ends now, in one write."""
        values = {name: plain(value) for name, value in metrics.items()}
        self.file.add({"step": step, "time": time.time(), "metrics": values})
        self.latest |= {name: float(value) for name, value in values.items() if isinstance(value, int | float)}

    def resume_at(self, step: int) -> None:
        """Drops the lines after `step`, the one whose checkpoint was loaded; all of them for 0, a run from nothing."""
        self.file.resume_at(step)

    def rows(self) -> list[StepRow]:
        """All steps in order, each once."""
        return read_steps(self.file.lines())


def read_steps(lines: Iterable[str]) -> list[StepRow]:
    """The steps of a file's lines in order, each once; a last line that is still being written is left out."""
    found: dict[int, StepRow] = {}
    for values in whole_rows(lines):
        add_row(found, StepRow(values["step"], values["time"], values["metrics"]))
    return [found[step] for step in sorted(found)]


def add_row(found: dict[int, StepRow], row: StepRow) -> None:
    """Adds a line's metrics to those of its step; those of a validation beside training to the step that it is of."""
    validated, metrics = row.number(VALIDATED), dict(row.metrics)
    if validated is not None and (origin := found.get(int(validated))) is not None:
        moved = {name: metrics.pop(name) for name in row.metrics if name.startswith(OF_VALIDATION)}
        found[origin.step] = StepRow(origin.step, origin.time, {**origin.metrics, **moved})
    earlier = found.get(row.step)
    if earlier is None:
        found[row.step] = StepRow(row.step, row.time, metrics)
    else:  # a validation that is logged after its step does not make the step longer
        ended = row.time if validated is None else earlier.time
        found[row.step] = StepRow(row.step, ended, {**earlier.metrics, **metrics})


def plain(value: object) -> object:
    """A metric as JSON has it; scalars of NumPy and of torch as numbers."""
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 0) == 0:
        value = item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def response_tokens(metrics: Mapping[str, object]) -> float:
    """Of a step's metrics as verl logs them: its tokens by the mean lengths of prompts and responses; 0 without."""
    tokens, response, prompt = (
        float(value) if isinstance(value := metrics.get(name), Real) else 0.0 for name in (TOKENS, RESPONSE, PROMPT)
    )
    return tokens * response / (response + prompt) if response + prompt else 0.0


def reward_metrics(names: Iterable[str]) -> list[str]:
    """The name of each data source's mean reward, in the order of the sources' names; none without a validation."""
    found = dict[str, tuple[tuple[bool, int], str]]()
    for name in names:
        if (match := REWARD.fullmatch(name)) is not None:
            rank = match["section"] == CORE, int(match["samples"])
            source = match["source"] or ""
            found[source] = max(found.get(source, (rank, name)), (rank, name))
    return [found[source][1] for source in sorted(found)]


def validation_reward(metrics: Mapping[str, Any]) -> tuple[float | None, str]:
    """The mean of the sources' rewards, and of which metrics; (None, "") in a step without a validation."""
    names = [name for name in reward_metrics(metrics) if isinstance(metrics[name], Real)]
    return (mean(float(metrics[name]) for name in names), mean_words(names)) if names else (None, "")


def mean_words(names: list[str]) -> str:
    """Of which metrics it is the mean: the name of the only one, or all of them."""
    return names[0] if len(names) == 1 else f"the mean of {', '.join(names[:-1])} and {names[-1]}"
