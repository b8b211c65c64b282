"""Whether calls generate: a count of all data planes that grows while they do, asked without waiting for a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

REPLY_S = 1.0  # replies take milliseconds; one that comes later is read at the next look


class CallProgress:
    """The sum of the data planes' counts. Owned state: the question that has no reply yet.

    Any data plane may have all the calls that are left, for sessions are divided among them. One thread asks.
    """

    def __init__(self, planes: Sequence[Any]) -> None:
        self.planes = planes
        self.asked: list[ray.ObjectRef[float]] = []

    def __call__(self) -> float | None:
        """The sum as of now, or as of the last question that had no reply until now; None without a reply of each.

        A data plane that is started again, or is gone, gives none: `DeathWatch` knows of those that do not come back.
        """
        self.asked = self.asked or [plane.progress.remote() for plane in self.planes]
        ready, _ = ray.wait(self.asked, num_returns=len(self.asked), timeout=REPLY_S)
        if len(ready) < len(self.asked):
            return None
        replies, self.asked = self.asked, []
        try:
            return float(sum(ray.get(replies)))
        except ray.exceptions.RayError:
            return None
