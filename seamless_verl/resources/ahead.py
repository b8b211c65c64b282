"""How far generation runs ahead of training, found while the run goes on. Pure.

The staleness bound says how old a token may be at most; how many steps' worth of prompts are outstanding decides how
old most of them are. So the run begins with one step's worth ahead, and tries one more only where devices would gain by
it: while training waits for groups, and engines run below their full rate because there are too few calls.

Legal transitions of `level`: up by one, to be tried; down by one, when that trial gained too little, which ends all
trials. So it never goes back and forth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import mean
from typing import Any

WINDOW = 3  # steps whose mean is looked at
WORTH = 0.05  # share of a step: less lost engine time is not worth older tokens
GAIN = 0.2  # of the lost time: a trial that saves less is taken back


class AheadLevel:
    """Steps' worth of prompts that are outstanding beyond the current step's, from 1 to `most`; `most` if that is 0."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.level = min(1, most)
        self.final = self.level == most
        self.before: float | None = None  # the share that was lost before the trial that runs
        self.settling = 0  # steps until a change has had its effect
        self.shares: deque[float] = deque(maxlen=WINDOW)

    def step_ended(self, step_s: float, lost_s: float) -> str | None:
        """A step has taken `step_s` seconds, of which engines lost `lost_s`; says what was changed, and why."""
        if self.final or step_s <= 0:
            return None
        if self.settling:
            self.settling -= 1
            return None
        self.shares.append(min(1.0, lost_s / step_s))
        if len(self.shares) < WINDOW:
            return None
        share = mean(self.shares)
        if self.before is not None and share > (1 - GAIN) * self.before:
            return self._take_back(share)
        self.before = None
        return self._try_more(share) if share > WORTH else None

    def _try_more(self, share: float) -> str | None:
        if self.level == self.most:
            self.final = True
            return None
        self.before = share
        self._change(self.level + 1)
        return f"{share:.0%} of the last steps were lost on engines with too few calls"

    def _take_back(self, share: float) -> str:
        before, self.before, self.final = self.before, None, True
        self._change(self.level - 1)
        return f"with one more {share:.0%} of the steps were lost, before it {before:.0%}"

    def _change(self, level: int) -> None:
        self.level, self.settling = level, level + 1
        self.shares.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "final": self.final, "before": self.before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the level of a checkpoint, as far as the bound now allows; it settles anew."""
        level = min(int(state["level"]), self.most)
        self.final = bool(state["final"]) or level == self.most
        self.before = state["before"] if level == state["level"] else None
        self._change(level)
