"""How much of their full rate engines lose while training waits for groups, and would lose with other prompts.

Owned state: what was seen at the last look, and the rate of an engine by its running calls, which is learned. An engine
with few calls generates fewer tokens a second than one with every seat taken; the difference is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from seamless_verl.resources.lending.marginal import RateCurve
from seamless_verl.rollout.observation import RolloutObservation

LOOK_S = 0.2  # between two looks: calls report their tokens in pieces


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
        self._last: tuple[float, RolloutObservation] | None = None

    def due(self, now: float) -> bool:
        """Whether it is time for a look."""
        return self._last is None or now - self._last[0] >= LOOK_S

    def look(self, observation: RolloutObservation, now: float, ahead: int) -> None:
        """Counts what was lost since the last look; the first look of a wait only begins.

        Calls come from `ahead` + 1 steps' worth of prompts. With another number of steps there would be more or fewer
        of them in proportion.
        """
        if self._last is not None:
            self._count(self._last[1], observation, now - self._last[0], 1 / (ahead + 1))
        self._last = (now, observation)

    def wait_ended(self) -> None:
        self._last = None

    def take(self) -> EngineLoss:
        """What was lost since the last call."""
        lost, self.lost = self.lost, EngineLoss()
        return lost

    def _count(self, before: RolloutObservation, after: RolloutObservation, seconds: float, step: float) -> None:
        rates: list[
            tuple[float, float, float]
        ] = []  # shares of the full rate: as it is, with fewer and with more calls
        waiting = after.waiting / max(1, len(after.replicas))
        for load in after.replicas:
            earlier = before.of(load.replica_id)
            calls = round((earlier.running + load.running) / 2)
            if load.generated >= earlier.generated:  # else its data plane was restarted
                self.curve.observe(calls, (load.generated - earlier.generated) / seconds)
            there = calls + waiting
            fewer, more = min(calls, there * (1 - step)), max(calls, min(load.seats, there * (1 + step)))
            rates.append(tuple(self.curve.efficiency(n, load.seats) for n in (calls, fewer, more)))  # type: ignore[arg-type]
        if rates:
            lost = self.lost
            now, fewer, more = (seconds * (1 - mean(shares)) for shares in zip(*rates, strict=True))
            self.lost = EngineLoss(lost.seconds + now, lost.with_fewer + fewer, lost.with_more + more)
