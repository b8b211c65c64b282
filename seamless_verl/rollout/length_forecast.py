"""How many tokens a running call still has to generate, foreseen from the lengths of calls that have ended. Pure.

The forecast is the mean residual life of the observed lengths: of all calls that grew longer than this one is now, the
mean of what they had still to go. A call that is longer than all of them is taken to be half done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from itertools import accumulate

REMEMBERED = 2048  # lengths; older ones are forgotten, since a model's lengths change while it learns


class LengthForecast:
    """Owned state: the last `REMEMBERED` lengths of ended calls, in tokens."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=REMEMBERED)
        self._sorted: list[int] = []
        self._sums: list[int] = [0]  # of the first i sorted lengths
        self._current = True

    def add(self, length: int) -> None:
        """A call has ended with so many tokens."""
        self._lengths.append(length)
        self._current = False

    def remaining(self, produced: int, limit: int | None = None) -> float:
        """Tokens that a call with `produced` tokens still generates, at most `limit`."""
        if not self._current:
            self._sorted, self._current = sorted(self._lengths), True
            self._sums = [0, *accumulate(self._sorted)]
        below = bisect_right(self._sorted, produced)
        longer = len(self._sorted) - below
        expected = (self._sums[-1] - self._sums[below]) / longer - produced if longer else float(produced)
        return expected if limit is None else min(expected, limit)
