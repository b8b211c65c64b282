"""How much of their full rate engines lose while training waits for groups.

Owned state: what was seen at the last look, and the rate of an engine by its running calls, which is learned. An engine
with few calls generates fewer tokens a second than one with every seat taken; the difference is lost.
"""

from __future__ import annotations

from seamless_verl.resources.lending.marginal import RateCurve
from seamless_verl.rollout.observation import RolloutObservation

LOOK_S = 0.2  # between two looks: calls report their tokens in pieces


class EngineUse:
    """Looks at the engines while training waits."""

    def __init__(self) -> None:
        self.curve = RateCurve()
        self.lost_s = 0.0
        self._last: tuple[float, RolloutObservation] | None = None

    def due(self, now: float) -> bool:
        """Whether it is time for a look."""
        return self._last is None or now - self._last[0] >= LOOK_S

    def look(self, observation: RolloutObservation, now: float) -> None:
        """Counts what was lost since the last look; the first look of a wait only begins."""
        if self._last is not None:
            self._count(self._last[1], observation, now - self._last[0])
        self._last = (now, observation)

    def wait_ended(self) -> None:
        self._last = None

    def take(self) -> float:
        """The seconds lost since the last call: the mean over the engines."""
        lost, self.lost_s = self.lost_s, 0.0
        return lost

    def _count(self, before: RolloutObservation, after: RolloutObservation, seconds: float) -> None:
        full = []
        for load in after.replicas:
            earlier = before.of(load.replica_id)
            calls = round((earlier.running + load.running) / 2)
            if load.generated >= earlier.generated:  # else its data plane was restarted
                self.curve.observe(calls, (load.generated - earlier.generated) / seconds)
            full.append(self.curve.efficiency(calls, load.seats))
        if full:
            self.lost_s += seconds * (1 - sum(full) / len(full))
