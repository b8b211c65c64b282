"""How many calls a replica takes at once: as many as its engine has seats for, fewer where its KV cache is too small.

vLLM admits requests as long as their present tokens fit, and preempts some when they have grown: what these had
computed is computed again. So calls are better kept waiting here, where another replica may take them and older
prompts go first. How many fit is not known before, for prefixes are shared and lengths differ. It is found by
additive increase and multiplicative decrease (Chiu and Jain 1989), as prime-rl bounds its rollouts. Pure.
"""

from __future__ import annotations

CUT = 0.8
"""Of the calls that a replica had when it preempted: how many it takes from then on."""
GROWTH = 1 / 8
"""Calls more for each call that ends without a preemption, while the bound is what keeps others waiting."""


class CallBound:
    """The bound of one replica, from 1 to `capacity` calls.

    Owned state: the bound, and the counts at the last look.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self._bound = capacity, float(capacity)
        self._preempted: int | None = None
        self._ended = 0

    @property
    def calls(self) -> int:
        return int(self._bound)

    def look(self, preempted: int, ended: int, load: int) -> int:
        """Adjusts the bound; returns how many requests were preempted since the last look.

        Args:
            preempted: requests that the engine has preempted since its start; fewer than before of a new engine.
            ended: calls that have left the replica since it was added.
            load: calls that it has now. Above the bound after a cut, which is judged once they are within it.
        """
        before, self._preempted = self._preempted, preempted
        left, self._ended = ended - self._ended, ended
        new = max(0, preempted - before) if before is not None else 0
        if new and load <= self.calls:
            self._bound = max(1.0, load * CUT)
        elif not new and load >= self.calls:
            self._bound = min(self.capacity, self._bound + left * GROWTH)
        return new
