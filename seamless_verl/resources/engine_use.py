"""How much of their full rate engines lose while training waits for groups, and would lose with other prompts.

Owned state: what was seen at the last look, and the rate of an engine by its running calls, which is learned. An engine
with few calls generates fewer tokens a second than one with every seat taken; the difference is lost. The trainer and
the simulator look through the same object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Protocol

from seamless_verl.resources.lending.marginal import RateCurve

LOOK_S = 0.2  # between two looks: calls report their tokens in pieces


class EngineLoad(Protocol):
    """An engine at one moment: its `running` calls, how many it has `seats` for, the tokens it generated so far, and
    whether it `serves`, or is paused."""

    @property
    def replica_id(self) -> str: ...

    @property
    def running(self) -> int: ...

    @property
    def seats(self) -> int: ...

    @property
    def generated(self) -> float: ...

    @property
    def serves(self) -> bool: ...


@dataclass(frozen=True)
class EngineLoss:
    """Seconds of full rate that engines lost in a step, as the mean over the engines.

    `with_fewer` and `with_more` estimate what they would have lost in the same waits with one step's worth of prompts
    fewer, and more.
    """

    seconds: float = 0.0
    with_fewer: float = 0.0
    with_more: float = 0.0


class EngineUse:
    """Looks at the engines while training waits."""

    def __init__(self) -> None:
        self.curve = RateCurve()
        self.lost = EngineLoss()
        self._last: tuple[float, Mapping[str, EngineLoad]] | None = None

    def due(self, now: float) -> bool:
        """Whether it is time for a look."""
        return self._last is None or now - self._last[0] >= LOOK_S

    def look(self, loads: Sequence[EngineLoad], waiting: int, now: float, ahead: int) -> None:
        """Counts what was lost since the last look; the first look of a wait only begins. `waiting` calls have no seat.

        Calls come from `ahead` + 1 steps' worth of prompts. With another number of steps there would be more or fewer
        of them in proportion.
        """
        if self._last is not None:
            self._count(self._last[1], loads, waiting / max(1, len(loads)), now - self._last[0], 1 / (ahead + 1))
        self._last = (now, {load.replica_id: load for load in loads})

    def wait_ended(self) -> None:
        self._last = None

    def take(self) -> EngineLoss:
        """What was lost since the last call."""
        lost, self.lost = self.lost, EngineLoss()
        return lost

    def _count(
        self, before: Mapping[str, EngineLoad], after: Sequence[EngineLoad], waiting: float, seconds: float, step: float
    ) -> None:
        """`waiting` calls an engine have no seat; `step` is one step's share of all calls."""
        shares: list[list[float]] = []  # of the full rate: as it is, with fewer and with more calls
        for load in after:
            earlier = before.get(load.replica_id, load)
            calls = round((earlier.running + load.running) / 2)
            restarted = load.generated < earlier.generated  # its data plane
            if load.serves and earlier.serves and not restarted:
                self.curve.observe(calls, (load.generated - earlier.generated) / seconds, seconds)
            there = calls + waiting
            fewer, more = min(calls, there * (1 - step)), max(calls, min(load.seats, there * (1 + step)))
            shares.append([self.curve.efficiency(number, load.seats) for number in (calls, fewer, more)])
        if shares:
            as_is, fewer, more = (seconds * (1 - mean(of_all)) for of_all in zip(*shares, strict=True))
            lost = self.lost
            self.lost = EngineLoss(lost.seconds + as_is, lost.with_fewer + fewer, lost.with_more + more)
