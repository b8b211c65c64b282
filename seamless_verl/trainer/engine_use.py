"""How much of their full rate engines lose while training waits for groups, and would lose with fewer prompts.

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
    """Seconds of a step that engines lost, their mean, and those they would have lost with one step's worth fewer."""

    seconds: float = 0.0
    with_fewer: float = 0.0


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

        With `ahead` steps' worth of prompts instead of one more there would be as many fewer calls in proportion.
        """
        if self._last is not None:
            self._count(self._last[1], observation, now - self._last[0], ahead / (ahead + 1))
        self._last = (now, observation)

    def wait_ended(self) -> None:
        self._last = None

    def take(self) -> EngineLoss:
        """What was lost since the last call."""
        lost, self.lost = self.lost, EngineLoss()
        return lost

    def _count(self, before: RolloutObservation, after: RolloutObservation, seconds: float, fewer: float) -> None:
        full, full_with_fewer = [], []
        waiting = after.waiting / max(1, len(after.replicas))
        for load in after.replicas:
            earlier = before.of(load.replica_id)
            calls = round((earlier.running + load.running) / 2)
            if load.generated >= earlier.generated:  # else its data plane was restarted
                self.curve.observe(calls, (load.generated - earlier.generated) / seconds)
            full.append(self.curve.efficiency(calls, load.seats))
            full_with_fewer.append(self.curve.efficiency(min(calls, (calls + waiting) * fewer), load.seats))
        if full:
            self.lost = EngineLoss(
                self.lost.seconds + seconds * (1 - mean(full)),
                self.lost.with_fewer + seconds * (1 - mean(full_with_fewer)),
            )
