"""How far generation runs ahead of training, found while the run goes on. Pure.

The staleness bound says how old a token may be at most; how many steps' worth of prompts are outstanding decides how
old most of them are. So the run begins with half of what the bound permits, and looks for the least at which engines
lose little. They lose, while training waits for groups, where they have too few calls for their full rate.

What more or less would bring is not tried: how much a few steps lose depends on the long samples that happen to be in
them, so that a trial would be decided by chance. It follows from what engines would lose with more or fewer calls in
the same waits. Less is safe only where no step of a window would lose by it, and where the devices that generate are
busy: that engines have nothing to do while training prepares a batch, as in short steps, is not seen in waits.

Legal transitions of `level` in a run: down by one, until it went up; up by one. So it turns once at most. A resume may
have another bound: the level is then cut to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import mean, median
from typing import Any

from seamless_verl.resources.engine_use import EngineLoss

WINDOW = 6  # steps that are looked at
WORTH = 0.05  # share of a step: less lost engine time is not worth older tokens


class AheadLevel:
    """Steps' worth of prompts that are outstanding beyond the current step's, from 1 to `most`; `most` if that is 0."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.level = (most + 1) // 2
        self.descends = True  # until it went up
        self.settling = 1  # steps until a change has had its effect; the first one starts the engines
        self.with_fewer: deque[float] = deque(maxlen=WINDOW)  # shares of a step that would have been lost
        self.idle: deque[float] = deque(maxlen=WINDOW)  # shares of the time of devices that generate
        self.gains: deque[float] = deque(maxlen=WINDOW)  # shares of a step that more would have saved

    def step_ended(self, step_s: float, lost: EngineLoss, idle: float = 0.0) -> str | None:
        """A step has taken `step_s` seconds, of which engines lost some; says what was changed, and why.

        `idle` is the share of the step in which devices that generate computed nothing.
        """
        if step_s <= 0:
            return None
        if self.settling:
            self.settling -= 1
            return None
        self.with_fewer.append(lost.with_fewer / step_s)
        self.idle.append(idle)
        self.gains.append((lost.seconds - lost.with_more) / step_s)
        if len(self.gains) < WINDOW:
            return None
        gain, loss = mean(self.gains), max(self.with_fewer)
        if gain > WORTH and self.level < self.most:
            self.descends = False
            self._change(self.level + 1)
            return f"one more would have kept engines from losing {gain:.0%} of the last steps"
        if loss <= WORTH and median(self.idle) <= WORTH and self.level > 1 and self.descends:
            self._change(self.level - 1)
            return f"with one fewer engines would have lost {loss:.0%} of a step at most"
        return None

    def _change(self, level: int) -> None:
        self.level, self.settling = level, level + 2  # the next step's prompts have been submitted
        self.with_fewer.clear()
        self.idle.clear()
        self.gains.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "descends": self.descends}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the level of a checkpoint, as far as the bound now allows; it settles anew."""
        self.descends = bool(state.get("descends", True))
        self._change(max(min(1, self.most), min(int(state["level"]), self.most)))
