"""Validation rewards of an arm's runs, and whether two arms differ by more than their seeds do. Pure.

A curve is the mean reward by step. What a run has learned is the mean of its last `LAST` validations, since one
alone is of few samples. Two arms are within noise when zero is in the 95% confidence interval of the difference of
their means over seeds, by Welch's t test (B. L. Welch, Biometrika 34, 1947): runs are few, and vary unlike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, variance

LAST = 3
LONGEST = 24  # characters of an arm's name above its column
QUANTILES = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 10: 2.23, 15: 2.13, 30: 2.04}
"""Student's t, two-sided 95%, by degrees of freedom; for those between, the next lower ones."""
Curve = Mapping[int, float]


@dataclass(frozen=True)
class Learned:
    """Of an arm: the mean over its runs, the variance of that mean, and how many runs there are."""

    mean: float
    of_mean: float
    runs: int

    @classmethod
    def of(cls, curves: Sequence[Curve]) -> Learned:
        ends = [learned(curve) for curve in curves]
        return cls(mean(ends), variance(ends) / len(ends), len(ends))

    def differs(self, other: Learned) -> tuple[float, float]:
        """How much more this one is, and half the width of that difference's 95% confidence interval."""
        both = self.of_mean + other.of_mean
        each = (one.of_mean**2 / (one.runs - 1) for one in (self, other))
        freedom = both**2 / sum(each) if both else 1.0
        return self.mean - other.mean, QUANTILES[max(n for n in QUANTILES if n <= max(freedom, 1) + 1e-9)] * sqrt(both)


def learned(curve: Curve) -> float:
    """Of what came after an update."""
    return mean(curve[step] for step in sorted(set(curve) - {0})[-LAST:])


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
    heads = list(arms) if max(map(len, arms)) <= LONGEST else [f"[{number}]" for number in range(1, len(arms) + 1)]
    yield from (f"{head} {name}" for head, name in zip(heads, arms, strict=True) if head != name)
    width = max(*map(len, heads), len("0.000-0.000")) + 2
    yield "step  " + "".join(head.rjust(width) for head in heads) + "   (mean over seeds, lowest-highest below)"
    for step in sorted(steps):
        yield f"{step:4}  " + "".join(f"{mean(c[step] for c in curves):{width}.3f}" for curves in arms.values())
        ranges = (f"{min(c[step] for c in curves):.3f}-{max(c[step] for c in curves):.3f}" for curves in arms.values())
        yield "      " + "".join(text.rjust(width) for text in ranges)
    first, *others = ((name, Learned.of(curves)) for name, curves in arms.items())
    yield f"{first[0]}: {first[1].mean:.3f} in the last {LAST} validations"
    for name, one in others:
        more, noise = one.differs(first[1])
        verdict = "within noise" if abs(more) <= noise else "differs"
        yield f"{name}: {one.mean:.3f}, {more:+.3f} +- {noise:.3f} (95%) to {first[0]}: {verdict}"
