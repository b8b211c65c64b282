"""Names what holds a run up, with its chain of waits, and recovers it once where that is possible.

It looks every few seconds, and asks no process more often than that. What is over its limit gets a line in the log, the
stacks of the processes concerned, and its recovery, if there is one (`runtime/stuck.py` has the order). If there is
none, or it does not help, and nothing else moves for as long as the limit, the run ends.

A look that comes late is left out: where this process stood still, the others did in most cases, as on a machine that
was suspended. Everything then seems to wait for too long, until it has had the time to go on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from seamless_verl.errors import NoProgressError
from seamless_verl.runtime.stuck import StuckNodes, StuckStage
from seamless_verl.runtime.waits import TRAINER, Blocked, Limits, Wait, WaitKind, find_blocked, follow
from seamless_verl.trainer.run_waits import SETTINGS

logger = logging.getLogger(__name__)
LOOKS = 10  # within the shortest limit
LEAST_S = 5.0  # between two looks
LATE = 2  # times that interval without a check: this process stood still
LINES = 4  # of one look; more nodes than that wait for the same in most cases

Recover = Callable[[Blocked], bool]
"""Recovers what is over its limit; False if that is not possible now. Returns without waiting for the effect."""


class StuckWatch:
    """Looks for what is over its limit.

    Args:
        collect: the graph of waits now.
        limits: seconds by kind.
        recoveries: by the kind of the node that is over its limit.
        report: the stacks of the processes that this chain concerns, as text.
        without_progress_s: for how many seconds neither the trainer nor any call has moved.
    """

    def __init__(
        self,
        collect: Callable[[], Sequence[Wait]],
        limits: Limits,
        recoveries: Mapping[WaitKind, Recover],
        *,
        report: Callable[[Blocked], str],
        without_progress_s: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.collect, self.limits, self.recoveries = collect, limits, recoveries
        self.report, self.without_progress_s, self.clock = report, without_progress_s, clock
        self.nodes = StuckNodes(clock)
        set_limits = [limit for limit in limits.values() if limit is not None]
        self.every_s = max(LEAST_S, min(set_limits) / LOOKS) if set_limits else None
        self.looked = self.checked = clock()
        self.late = False
        self._metrics = self.nodes.metrics()

    def check(self) -> None:
        """Looks if it is time to; one look after a late one is made whatever comes.

        Raises:
            NoProgressError: something is over its limit, was not recovered, and nothing else moves.
        """
        if self.every_s is None:
            return
        stood_still_s = self.clock() - self.checked
        try:
            self._check(self.every_s, stood_still_s)
        finally:
            self.checked = self.clock()  # what a look itself takes is no standing still

    def _check(self, every_s: float, stood_still_s: float) -> None:
        if self.clock() - self.looked < every_s:
            return
        self.looked = self.clock()
        before, self.late = self.late, stood_still_s > LATE * every_s
        if self.late and not before:
            logger.warning("no look for what waits: this process stood still for %.0f s", stood_still_s)
            return
        blocked = find_blocked(self.collect(), self.limits)
        new = self.nodes.look(blocked)
        for one in new[:LINES]:
            logger.error("%s\n%s", one, self.report(one))
        if len(new) > LINES:
            logger.error("%d more are over their limits", len(new) - LINES)
        for one in blocked:
            recover = self.recoveries.get(one.over.kind)
            if self.nodes.stage(one.over.name) is StuckStage.NAMED and recover is not None and recover(one):
                self.nodes.tried(one.over.name)
        self._metrics = self.nodes.metrics()
        if blocked:
            self._check_left(blocked)

    def _check_left(self, blocked: Sequence[Blocked]) -> None:
        """Not for a trainer that computes, nor for groups, whose scoring may take long: `no_progress_s` is theirs."""
        still_s = self.without_progress_s()
        for one in blocked:
            if one.over.kind is WaitKind.GROUP or one.culprit.kind in (WaitKind.TRAINER, WaitKind.COMPUTING):
                continue
            limit = self.limits[one.over.kind]
            if limit is not None and still_s > limit and self.nodes.stage(one.over.name) is not StuckStage.TRIED:
                raise NoProgressError(str(one), limit, SETTINGS[one.over.kind])

    def explain(self) -> str:
        """What the trainer waits for at this moment, as one line."""
        nodes = {wait.name: wait for wait in self.collect()}
        return str(follow(nodes, nodes[TRAINER], self.limits))

    def metrics(self) -> dict[str, float]:
        """Counts of the run as of the last look, see `StuckNodes.metrics`; any thread may ask."""
        return self._metrics
