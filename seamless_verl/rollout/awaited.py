"""Replicas that are about to serve: a call that prefers one may wait for it (routing.py says which).

Replicas of a fleet start one after another, after a pause as after a weight update. Without this the first of them
would get all calls that wait, which with a new step are all calls of its prompts, and the others none.

Owned state: two flags of each replica. `resuming`: its control executes a resume. `expected`: it loads the committed
weights now, or when its turn comes. A replica that serves, or that will not after all, is no longer expected. Each
flag also ends by time, so that a replica that hangs does not hold calls for which others have room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from seamless_verl.rollout.replica import Replica

RESUME_S = 1.0  # the longest that calls wait for the resume of their preferred replica, which takes milliseconds
# The longest that calls wait for the load of their preferred replica. It takes from milliseconds to seconds, and there
# are as many rounds of loads as a host has replicas (weights/commit.py).
LOADS_S = 10.0


class AwaitedReplicas:
    """Has calls wait for replicas; `grant_waiting` is called when they need wait for one no longer."""

    def __init__(self, grant_waiting: Callable[[], None]) -> None:
        self._grant_waiting = grant_waiting
        self._expected: list[Replica] = []
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def resuming(self, replica: Replica) -> Iterator[None]:
        """Calls that prefer this replica wait until the block ends, or `RESUME_S`."""
        replica.resuming = True
        self._grant_waiting()  # what waited for another one may prefer this, which may be full
        timer = asyncio.get_running_loop().call_later(RESUME_S, self._end_resuming, replica)
        try:
            yield
        finally:
            timer.cancel()
            self._end_resuming(replica)

    def expect(self, replicas: Iterable[Replica]) -> None:
        """Calls that prefer one of these may wait until it has loaded, or `LOADS_S` from the last that was added."""
        added = [replica for replica in replicas if not replica.expected]
        if not added:
            return
        self._expected = [replica for replica in self._expected if replica.expected] + added
        for replica in added:
            replica.expected = True
        self._grant_waiting()  # as above
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(LOADS_S, self._end_expecting)

    def _end_resuming(self, replica: Replica) -> None:
        replica.resuming = False
        self._grant_waiting()

    def _end_expecting(self) -> None:
        for replica in self._expected:
            replica.expected = False
        self._expected = []
        self._grant_waiting()
