"""What a policy learns from views: an engine's rate by its running calls, and how fast groups finish."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

WEIGHT = 0.1  # of a new measurement in a moving average


def averaged(old: float | None, new: float, weight: float = WEIGHT) -> float:
    """The exponentially weighted moving average after one more measurement."""
    return new if old is None else old + weight * (new - old)


class RateCurve:
    """Tokens/s at c running calls: moving averages in buckets of powers of two, straight lines between them.

    Below the smallest bucket measured the rate is taken as proportional, above the largest as constant;
    with nothing measured, as proportional throughout.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # bucket -> mean calls, mean rate

    def observe(self, calls: int, rate: float) -> None:
        """One measurement; an engine that stands still says nothing."""
        if calls > 0 and rate > 0:
            bucket = calls.bit_length()
            at, mean = self._points.get(bucket, (None, None))
            self._points[bucket] = (averaged(at, calls), averaged(mean, rate))

    def at(self, calls: float) -> float:
        """The rate to expect, tokens/s."""
        points = [(0.0, 0.0), *(self._points[bucket] for bucket in sorted(self._points))]
        if len(points) == 1:
            return float(calls)
        for (c0, r0), (c1, r1) in pairwise(points):
            if calls <= c1:
                return r0 + (r1 - r0) * (calls - c0) / (c1 - c0)
        return points[-1][1]

    def efficiency(self, calls: float, seats: int) -> float:
        """The rate at `calls` as a share of that with every seat taken, 0 to 1."""
        full = max(self.at(seats), self.at(calls))
        return self.at(calls) / full if full > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {str(bucket): list(point) for bucket, point in self._points.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._points = {int(bucket): (float(at), float(rate)) for bucket, (at, rate) in state.items()}


class GroupPace:
    """Seconds of generation between two finished groups; time in which no engine ran does not count."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._seen: int | None = None
        self._now = 0.0
        self._elapsed = 0.0
        self._generating = False

    def observe(self, now: float, finished: int, generating: bool) -> None:
        if self._generating:
            self._elapsed += now - self._now
        if self._seen is not None and finished > self._seen and self._elapsed > 0:
            self.seconds = averaged(self.seconds, self._elapsed / (finished - self._seen))
            self._elapsed = 0.0
        self._now, self._seen, self._generating = now, finished, generating

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: state[name] for name in vars(self)})
