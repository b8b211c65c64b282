"""Whether calls generate: a count of all data planes that grows while they do, asked without waiting for replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

REPLY_S = 1.0  # replies take milliseconds; one that comes later is read at the next look


class PlaneProgress:
    """The sum of the data planes' counts.

    Any data plane may have all the calls that are left, for sessions are divided among them; and one that hangs, or is
    started again, keeps nobody from seeing that others generate. Owned state: of each data plane its last count, and
    the question that has no reply yet. One thread asks.
    """

    def __init__(self, planes: Sequence[Any]) -> None:
        self.planes = planes
        self.asked: dict[int, ray.ObjectRef[float]] = {}
        self.counts: dict[int, float] = {}

    def __call__(self) -> float | None:
        """The sum of the last counts; None before the first reply.

        A data plane that is gone keeps its last one: `DeathWatch` knows of those that do not come back.
        """
        for number, plane in enumerate(self.planes):
            if number not in self.asked:
                self.asked[number] = plane.progress.remote()
        ready, _ = ray.wait(list(self.asked.values()), num_returns=len(self.asked), timeout=REPLY_S)
        for number in [number for number, reply in self.asked.items() if reply in ready]:
            try:
                self.counts[number] = float(ray.get(self.asked.pop(number)))
            except ray.exceptions.RayError:
                continue
        return sum(self.counts.values()) if self.counts else None
