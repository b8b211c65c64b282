"""Validation rewards of an arm's runs, and whether two arms differ by more than their seeds do. Pure.

A curve is the mean reward by step. What a run has learned is the mean of its last `LAST` validations, since one
alone is of few samples. Two arms are within noise when the difference of their means over seeds is at most two
standard errors of it, sqrt(var_a / n_a + var_b / n_b) with the samples' variances, as in Welch's test.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, variance

LAST = 3
Curve = Mapping[int, float]


@dataclass(frozen=True)
class Learned:
    """Of an arm: the mean over its runs, and the variance of that mean."""

    mean: float
    of_mean: float

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> Learned:
        ends = [learned(curve) for curve in curves]
        return cls(mean(ends), variance(ends) / len(ends))

    def differs(self, other: Learned) -> tuple[float, float]:
        """How much more this one is, and two standard errors of that."""
        return self.mean - other.mean, 2 * sqrt(self.of_mean + other.of_mean)


def learned(curve: Curve) -> float:
    return mean(curve[step] for step in sorted(curve)[-LAST:])


def rewards(rows: Sequence[Mapping[str, object]]) -> dict[int, float]:
    """The curve in verl's file logger: lines of {"step", "data"}; of two of a step, the later one counts."""
    found = dict[int, float]()
    for row in rows:
        step, data = row["step"], row["data"]
        assert isinstance(step, int) and isinstance(data, Mapping)
        names = [name for name in data if "/reward/mean@" in name]
        if names:
            found[step] = float(data[min(names)])
    return found


def table(arms: Mapping[str, Sequence[Curve]]) -> Iterator[str]:
    """A line for each step that all runs validated at, then what each arm has learned, beside the first one."""
    steps = set.intersection(*(set(curve) for curves in arms.values() for curve in curves))
    width = max(map(len, arms)) + 2
    yield "step  " + "".join(name.rjust(width) for name in arms) + "   (mean over seeds, lowest-highest below)"
    for step in sorted(steps):
        yield f"{step:4}  " + "".join(f"{mean(c[step] for c in curves):{width}.3f}" for curves in arms.values())
        ranges = (f"{min(c[step] for c in curves):.3f}-{max(c[step] for c in curves):.3f}" for curves in arms.values())
        yield "      " + "".join(text.rjust(width) for text in ranges)
    first, *others = ((name, Learned.of(curves)) for name, curves in arms.items())
    yield f"{first[0]}: {first[1].mean:.3f} in the last {LAST} validations"
    for name, one in others:
        more, noise = one.differs(first[1])
        verdict = "within noise" if abs(more) <= noise else "differs"
        yield f"{name}: {one.mean:.3f}, {more:+.3f} to {first[0]}, two standard errors {noise:.3f}: {verdict}"
