"""What hand-overs and computations took, as the lending policy wants to know it."""

from __future__ import annotations

import time

from seamless_verl.resources.lending import Costs
from seamless_verl.resources.lending.rates import averaged


class Measured:
    """Moving averages: seconds of a hand-over, of a mini-batch's training, and from each computation to the next."""

    def __init__(self) -> None:
        self.switch_s = 0.0
        self.train_s: float | None = None
        self.gaps: dict[str, float] = {}
        self.ended: tuple[str, float] | None = None

    def switched(self, seconds: float) -> None:
        self.switch_s = averaged(self.switch_s or None, seconds)

    def begins(self) -> None:
        if self.ended is not None:
            name, at = self.ended
            self.gaps[name] = averaged(self.gaps.get(name), time.monotonic() - at)

    def has_ended(self, name: str, seconds: float) -> None:
        self.train_s = averaged(self.train_s, seconds)
        self.ended = (name, time.monotonic())

    @property
    def costs(self) -> Costs:
        return Costs(self.switch_s, self.switch_s, self.train_s or 0.0)
