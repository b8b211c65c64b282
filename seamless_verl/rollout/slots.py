"""The slots that calls hold on the replicas of a fleet, and the calls that wait for one.

Invariants:
- A call is granted a slot only on a replica that is SERVING, with the committed weights, and has room. A replica that
  waits for its turn in a weight update only continues the calls that it has, and so does one whose device training has.
- Slots granted = given back + dropped with their replica + attached.
- No call waits while a serving replica has room, unless it waits for the one that it prefers (routing.py: `awaited`).
- A slot goes to the first call, by its place, whose preferred replica has room, else to the first of all. A call goes
  before both, after such calls of older prompts, once more than `overtaking` calls have entered the queue after it.
- A waiter stays in the queue until it is granted a slot or leaves. If it leaves at the moment of its grant, the slot is
  given back.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from seamless_verl.errors import IntegrityError
from seamless_verl.rollout.precedence import Precedence
from seamless_verl.rollout.replica import Replica, ReplicaView, Slot
from seamless_verl.rollout.routing import PrefixAffinity

RESUME_S = 1.0  # the longest that calls wait for the resume of their preferred replica, which takes milliseconds
# The longest that calls wait for the load of their preferred replica. It takes from milliseconds to seconds, and there
# are as many rounds of loads as a host has replicas (weights/commit.py).
LOADS_S = 10.0
PLACE, ARRIVAL = attrgetter("place"), attrgetter("arrival")
OVERDUE = attrgetter("place.version", "arrival")


@dataclass(eq=False)
class Waiter:
    """A waiting call: `arrival` counts the calls that entered the queue; calls of one `prompt` may be equally long."""

    place: Precedence
    arrival: int
    key: str
    prompt: str
    granted: asyncio.Future[Slot]
    overdue: bool = False


class Slots:
    """Grants slots on `replicas`, by name, as the routing policy decides; the fleet owns them, and adds to them.

    Owned state: how many slots were granted, given back, and dropped with a replica; the queue; and two flags of each
    replica that is about to serve, for which a call that prefers it may wait. Replicas start one after another, after a
    pause as after a weight update: without this the first would get all calls that wait. `resuming`: its control
    executes a resume. `expected`: it loads the committed weights now, or when its turn comes. Each flag also ends by
    time, so that a replica that hangs does not hold calls for which others have room.

    With a thousand prompts a step thousands of calls wait, and as many slots are given back. So a grant passes over
    waiting calls only until one prefers a replica with room, and nothing is sorted anew. `_waiters` is sorted by
    place; `_by_arrival` has the same in order of arrival, and some that have left; the overdue ones of them are in
    `_overdue` instead, sorted. `_beginning` has those of each named prompt.
    """

    def __init__(self, replicas: Mapping[str, Replica], overtaking: int) -> None:
        self._replicas, self._policy, self._overtaking = replicas, PrefixAffinity(), overtaking
        self._granted = self._given_back = self._dropped = self._arrivals = 0
        self._waiters: list[Waiter] = []
        self._by_arrival = deque[Waiter]()
        self._overdue: list[Waiter] = []
        self._beginning = defaultdict[str, set[Waiter]](set)
        self._expected: list[Replica] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def view(self) -> tuple[ReplicaView, ...]:
        return tuple(replica.view for replica in self._replicas.values())

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    async def acquire(self, key: str, place: Precedence, prompt: str = "") -> Slot:
        """A slot on a serving replica; waits until there is one, among the others at its `place`.

        Calls of one `prompt`, a name, get their places anew when `foresee` is called for it.
        """
        if (slot := self._grant(key)) is not None:  # no waiting call would take it: each waits for one it prefers
            return slot
        self._arrivals += 1
        waiter = Waiter(place, self._arrivals, key, prompt, asyncio.get_running_loop().create_future())
        insort(self._waiters, waiter, key=PLACE)
        self._by_arrival.append(waiter)
        if prompt:
            self._beginning[prompt].add(waiter)
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            if waiter.granted.cancelled():
                self._remove(waiter)
            else:
                waiter.granted.result().release()
            raise

    def foresee(self, prompt: str, shortness: int) -> None:
        """Calls of this prompt are expected to be so short (precedence.py): those that wait get their new places."""
        for waiter in sorted(self._beginning.get(prompt, ()), key=ARRIVAL):
            del self._waiters[self._index(waiter)]
            waiter.place = waiter.place.expecting(shortness)
            insort(self._waiters, waiter, key=PLACE)

    def grant_waiting(self) -> None:
        """Grants slots to waiting calls; to be called whenever there may be room where there was none."""
        if not (self._waiters and self._has_slot()):
            return
        preferred, granted = self._policy.preferred(self.view), list[Waiter]()
        refused = set[str | None]()  # where one call waits for the replica that it prefers, all that prefer it do, too
        self._find_overdue()
        at_once = (waiter for waiter in self._waiters if self._fits(preferred(waiter.key)))  # found as slots are taken
        for waiter in chain(self._overdue, at_once, self._waiters):
            if waiter.granted.done() or (its_own := preferred(waiter.key)) in refused:
                continue
            if (slot := self._grant(waiter.key)) is None:
                refused.add(its_own)
                continue
            waiter.granted.set_result(slot)
            granted.append(waiter)
            if not self._has_slot():
                break
        for waiter in granted:
            self._remove(waiter)

    @contextmanager
    def resuming(self, replica: Replica) -> Iterator[None]:
        """Calls that prefer this replica wait until the block ends, or `RESUME_S`."""
        replica.resuming = True
        self.grant_waiting()  # what waited for another one may prefer this, which may be full
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
        self.grant_waiting()  # as above
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(LOADS_S, self._end_expecting)

    def dropped(self, number: int) -> None:
        """A replica has dropped so many slots."""
        self._dropped += number

    def metrics(self) -> dict[str, float]:
        return self._policy.metrics()

    def check_integrity(self) -> None:
        """Raises IntegrityError if slots and the queue contradict each other."""
        attached = sum(len(replica.slots) for replica in self._replicas.values())
        accounted = self._given_back + self._dropped + attached
        check_equal("slots given back + dropped + attached", self._granted, accounted)
        preferred, awaited = self._policy.preferred(self.view), self._policy.awaited(self.view)
        waiting = [waiter.key for waiter in self._waiters if not waiter.granted.done()] if self._has_slot() else []
        idle = sum(preferred(key) not in awaited for key in waiting)
        check_equal("calls that wait while there is room", 0, idle)

    def _find_overdue(self) -> None:
        """Moves those that more than `overtaking` later ones have come after."""
        while self._by_arrival and self._by_arrival[0].arrival < self._arrivals - self._overtaking:
            waiter = self._by_arrival.popleft()
            if not waiter.granted.done():
                insort(self._overdue, waiter, key=OVERDUE)
                waiter.overdue = True

    def _remove(self, waiter: Waiter) -> None:
        del self._waiters[self._index(waiter)]
        if waiter.overdue:
            del self._overdue[bisect_left(self._overdue, OVERDUE(waiter), key=OVERDUE)]
        if waiter.prompt:
            siblings = self._beginning[waiter.prompt]
            siblings.discard(waiter)
            if not siblings:
                del self._beginning[waiter.prompt]

    def _index(self, waiter: Waiter) -> int:
        return self._waiters.index(waiter, bisect_left(self._waiters, waiter.place, key=PLACE))

    def _end_resuming(self, replica: Replica) -> None:
        replica.resuming = False
        self.grant_waiting()

    def _end_expecting(self) -> None:
        for replica in self._expected:
            replica.expected = False
        self._expected = []
        self.grant_waiting()

    def _has_slot(self) -> bool:
        return any(map(self._fits, self._replicas))

    def _fits(self, replica_id: str | None) -> bool:
        return replica_id is not None and self._replicas[replica_id].view.has_slot

    def _grant(self, key: str) -> Slot | None:
        chosen = self._policy.decide(self.view, key)
        if chosen is None:
            return None
        replica = self._replicas[chosen]
        assert replica.view.has_slot, f"chosen was {chosen}, which is {replica.view}"
        slot = Slot(replica, self._give_back, replica.pauses)
        replica.slots.add(slot)
        self._granted += 1
        return slot

    def _give_back(self, slot: Slot) -> None:
        if slot.attached:
            slot.replica.slots.remove(slot)
            self._given_back += 1
            self.grant_waiting()


def check_equal(law: str, expected: int, found: int) -> None:
    if expected != found:
        raise IntegrityError(law, expected, found)
