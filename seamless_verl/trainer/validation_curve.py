"""The validation curve: one number for each validation, its mean reward, kept in a file beside the checkpoints.

The file is JSON lines of `{"step": int, "metric": str, "value": float}`, appended as training goes;
a resumed run continues it. With several data sources the number is the mean of their rewards, and `metric` names all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from seamless_verl.runtime.files import JsonLines
from seamless_verl.runtime.step_metrics import validation_reward

FILE = "validation_curve.jsonl"
TITLE = "validation curve"
WIDTH, HEIGHT = 60, 12  # of the text plot, in characters


@dataclass(frozen=True)
class Point:
    """The value of `metric` after `step` updates."""

    step: int
    metric: str
    value: float


class ValidationCurve:
    """The curve of one run; `path` is its only state."""

    def __init__(self, path: Path) -> None:
        self.path, self.file = path, JsonLines(path)

    @classmethod
    def beside(cls, checkpoints: str) -> ValidationCurve:
        return cls(Path(checkpoints) / FILE)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the mean reward of a validation, taken from verl's validation metrics."""
        value, name = validation_reward(metrics)
        if value is None:
            return
        self.file.add({"step": step, "metric": name, "value": value})

    def truncate_after(self, step: int) -> None:
        """Drops the points after `step`, from which a run resumes; all of them for 0, a run from nothing."""
        self.file.resume_at(step)

    def points(self) -> list[Point]:
        """All points in order of steps; if a step has two, as after a resume, the later one counts."""
        latest = {row["step"]: Point(row["step"], row["metric"], row["value"]) for row in self.file.rows()}
        return [latest[step] for step in sorted(latest)]


def text_plot(points: list[Point]) -> str:
    """The curve in characters, with its first and last value."""
    if len(points) < 2:
        return f"{TITLE}: fewer than two validations"
    first, last = points[0], points[-1]
    low, high = min(p.value for p in points), max(p.value for p in points)
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    for point in points:
        x = round((point.step - first.step) / (last.step - first.step) * (WIDTH - 1))
        y = round((point.value - low) / ((high - low) or 1.0) * (HEIGHT - 1))
        rows[HEIGHT - 1 - y][x] = "*"
    labels = {0: f"{high:8.3f}", HEIGHT - 1: f"{low:8.3f}"}
    body = [f"{labels.get(i, ''):>8} |{''.join(row)}" for i, row in enumerate(rows)]
    axis = f"{'':>8} +{'-' * WIDTH}\n{'':>9} step {first.step:<{WIDTH - 12}}{last.step:>6}"
    times = f", {last.value / first.value:.1f} times" if first.value > 0 else ""
    return "\n".join([f"{TITLE}: {first.metric}", *body, axis, f"from {first.value:.3f} to {last.value:.3f}{times}"])
