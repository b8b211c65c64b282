"""The slots that calls hold on the replicas of a fleet, and the calls that wait for one.

Invariants:
- A call is granted a slot only on a replica that is SERVING, with the committed weights, and has room. A replica that
  waits for its turn in a weight update only continues the calls that it has, and so does one whose device training has.
- Slots granted = given back + dropped with their replica + attached.
- No call waits while a serving replica has room, unless it waits for the one that it prefers (routing.py: `awaited`).
"""

from __future__ import annotations

from collections.abc import Mapping

from seamless_verl.errors import IntegrityError
from seamless_verl.rollout.precedence import Precedence
from seamless_verl.rollout.replica import Replica, Slot
from seamless_verl.rollout.routing import ReplicaView, RoutingPolicy
from seamless_verl.rollout.wait_queue import WaitQueue


class Slots:
    """Grants slots on `replicas`, by name, as the routing policy decides; the fleet owns them, and adds to them.

    Owned state: the queue, and how many slots were granted, given back, and dropped with a replica. A waiting call is
    overtaken by no call of a prompt of its age or younger that came more than `overtaking` calls later.
    """

    def __init__(self, replicas: Mapping[str, Replica], policy: RoutingPolicy, overtaking: int) -> None:
        self._replicas, self._policy = replicas, policy
        self._queue = WaitQueue(overtaking)
        self._granted = self._given_back = self._dropped = 0

    @property
    def view(self) -> tuple[ReplicaView, ...]:
        return tuple(replica.view for replica in self._replicas.values())

    @property
    def waiting(self) -> int:
        return len(self._queue)

    async def acquire(self, key: str, place: Precedence, prompt: str) -> Slot:
        """A slot on a serving replica; waits until there is one, among the others at its `place`."""
        slot = self._grant(key)  # no waiting call would take it: each waits for the replica that it prefers
        return slot if slot is not None else await self._queue.wait(key, place, prompt)

    def foresee(self, prompt: str, shortness: int) -> None:
        """Calls of this prompt are expected to be so short (precedence.py)."""
        self._queue.foresee(prompt, shortness)

    def grant_waiting(self) -> None:
        """Grants slots to waiting calls; to be called whenever there may be room where there was none."""
        if len(self._queue) and self._has_room():
            preferred, refused = self._policy.preferred(self.view), set[str | None]()

            def grant(key: str) -> Slot | None:
                """As `_grant`. Where one call waits for the replica that it prefers, all others that prefer it do, too:
                until the queue is through loads only grow."""
                if (its_own := preferred(key)) in refused:
                    return None
                if (slot := self._grant(key)) is None:
                    refused.add(its_own)
                return slot

            self._queue.grant_slots(grant, lambda key: self._fits(preferred(key)), self._has_room)

    def dropped(self, number: int) -> None:
        """A replica has dropped so many slots."""
        self._dropped += number

    def check_integrity(self) -> None:
        """Raises IntegrityError if slots and the queue contradict each other."""
        attached = sum(len(replica.slots) for replica in self._replicas.values())
        accounted = self._given_back + self._dropped + attached
        check_equal("slots given back + dropped + attached", self._granted, accounted)
        preferred, awaited = self._policy.preferred(self.view), self._policy.awaited(self.view)
        idle = [key for key in self._queue.keys if preferred(key) not in awaited] if self._has_room() else []
        check_equal("calls that wait while there is room", 0, len(idle))

    def _has_room(self) -> bool:
        return any(map(self._fits, self._replicas))

    def _fits(self, replica_id: str | None) -> bool:
        return replica_id is not None and self._replicas[replica_id].view.has_room

    def _grant(self, key: str) -> Slot | None:
        chosen = self._policy.decide(self.view, key)
        if chosen is None:
            return None
        replica = self._replicas[chosen]
        assert replica.view.has_room, f"{type(self._policy).__name__} chose {chosen}, which is {replica.view}"
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
