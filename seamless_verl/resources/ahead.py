"""How far generation runs ahead of training, found while the run goes on. Pure.

The staleness bound says how old a token may be at most; how many steps' worth of prompts are outstanding decides how
old most of them are. So the run begins with half of what the bound permits, and looks for the least at which engines
lose little. They lose, while training waits for groups, where they have too few calls for their full rate.

More is tried, since only a trial shows what it gains. Less is not tried: the wait for a long sample that is rare would
be noticed too late. It follows from what engines would lose with fewer calls.

Legal transitions of `level`: down by one, until more was tried; up by one; down by one, when that trial gained too
little, which ends all of them. So it turns twice at most, and never goes back and forth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import mean
from typing import Any, Protocol

WINDOW = 3  # steps whose mean is looked at
LONG_WINDOW = 6  # steps that must all speak for less
WORTH = 0.05  # share of a step: less lost engine time is not worth older tokens
GAIN = 0.2  # of the lost time: a trial that saves less is taken back


class LostTime(Protocol):
    """Seconds that engines lost in a step, and that they would have lost with one step's worth fewer."""

    @property
    def seconds(self) -> float: ...

    @property
    def with_fewer(self) -> float: ...


class AheadLevel:
    """Steps' worth of prompts that are outstanding beyond the current step's, from 1 to `most`; `most` if that is 0."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.level = (most + 1) // 2
        self.final = most <= 1
        self.descends = True  # until more was tried
        self.before: float | None = None  # the share that was lost before the upward trial that runs
        self.settling = 1  # steps until a change has had its effect; the first one starts the engines
        self.shares: deque[float] = deque(maxlen=WINDOW)
        self.with_fewer: deque[float] = deque(maxlen=LONG_WINDOW)

    def step_ended(self, step_s: float, lost: LostTime) -> str | None:
        """A step has taken `step_s` seconds, of which engines lost some; says what was changed, and why."""
        if self.final or step_s <= 0:
            return None
        if self.settling:
            self.settling -= 1
            return None
        self.shares.append(min(1.0, lost.seconds / step_s))
        self.with_fewer.append(min(1.0, lost.with_fewer / step_s))
        seen, share = len(self.shares), mean(self.shares)
        if self.before is None and 1 < seen < WINDOW and seen * share > WINDOW * WORTH:
            return self._try_more(share)  # the window's mean will be above `WORTH`, whatever the rest of it brings
        if seen < WINDOW:
            return None
        self.shares.clear()
        if self.before is not None and share > (1 - GAIN) * self.before:
            return self._take_back(share)
        self.before = None
        return self._try_more(share) if share > WORTH else self._take_less()

    def _try_more(self, share: float) -> str | None:
        if self.level == self.most:
            self.final = True
            return None
        self.before, self.descends = share, False
        self._change(self.level + 1)
        return f"{share:.0%} of the last steps were lost on engines with too few calls"

    def _take_less(self) -> str | None:
        if not self.descends or self.level == 1 or len(self.with_fewer) < LONG_WINDOW:
            return None
        if max(self.with_fewer) > WORTH:
            return None
        reason = f"with one fewer at most {max(self.with_fewer):.0%} of a step would have been lost"
        self._change(self.level - 1)
        return reason

    def _take_back(self, share: float) -> str:
        before, self.before, self.final = self.before, None, True
        self._change(self.level - 1)
        return f"with one more {share:.0%} of the steps were lost, before it {before:.0%}"

    def _change(self, level: int) -> None:
        self.level, self.settling = level, level + 1
        self.shares.clear()
        self.with_fewer.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "final": self.final, "before": self.before, "descends": self.descends}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the level of a checkpoint, as far as the bound now allows; it settles anew."""
        level = min(int(state["level"]), self.most)
        self.final = bool(state["final"]) or level == self.most
        self.before = state["before"] if level == state["level"] else None
        self.descends = bool(state["descends"])
        self._change(level)
