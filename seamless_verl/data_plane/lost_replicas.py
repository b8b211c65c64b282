"""What the data plane does about replicas that are lost: it reconnects, gives them up, and takes them back.

A replica is *lost* when its connection is. While its server's actor is alive it may only be unreachable: the data plane
retries until `RECONNECT_S` have passed, and then *gives it up*, as it does at once where the actor is dead. One that
was given up stays dead until another server is attached in its place, or, where none is started, until its own replies
again and it is taken back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from typing import Any

from seamless_verl.data_plane.connections import ReplicaConnections
from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.errors import ReplicaLostError, shorten
from seamless_verl.rollout.manager import GIVEN_UP_ELSEWHERE, RolloutManager
from seamless_verl.rollout.replica import DEAD, SERVING, STALE, ReplicaView
from seamless_verl.rollout.restarts import LossReason, ReplicaLoss

logger = logging.getLogger(__name__)
RECONNECT_S = 30.0  # for all attempts, while commands wait
RETURN_S = 10.0  # between two looks for replicas that were given up as unreachable
RETRY_S = 0.2  # between two attempts: nothing notifies of a port that opens
TAKEN_BACK = "fleet/taken_back"
LOSS_METRICS = frozenset({TAKEN_BACK, *(f"fleet/given_up/{reason}" for reason in LossReason)})
"""How many replicas were given up, by the reason, and how many of them were taken back."""


class LostReplicas:
    """Follows replicas from their loss to their return or replacement; `on_failure` gets what fails in a task.

    Owned state: replicas that are `to_reconnect`, those that are being reconnected now, and those that were `given_up`;
    a replica is in one of these at most. One that was taken back is `unproved` until it serves, and is not taken back
    again before: each attempt holds commands up. It is `unloaded` until the trainer was told of it.
    """

    def __init__(
        self,
        settings: PlaneSettings,
        manager: RolloutManager,
        connections: ReplicaConnections,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.settings, self.manager, self.connections = settings, manager, connections
        self.fleet, self.on_failure = connections.fleet, on_failure
        self.to_reconnect, self._trying = set(connections.addresses), set[str]()
        self.given_up: dict[str, ReplicaLoss] = {}
        self.stuck: dict[str, str] = {}  # why a replica is about to be lost that gives no tokens
        self.unproved, self.unloaded = set[str](), set[str]()
        self.counts = Counter(dict.fromkeys(LOSS_METRICS, 0))
        self.serving_since: dict[str, float] = {}
        self.served_s: defaultdict[str, float] = defaultdict(float)  # of its present server, or its last
        self.reconnecting: asyncio.Task[None] | None = None
        self.returning: asyncio.Task[None] | None = None
        self.stopping = False

    def stop(self) -> None:
        """Later losses are part of the end."""
        self.stopping = True
        if self.returning is not None:
            self.returning.cancel()

    @property
    def unconnected(self) -> set[str]:
        """Replicas that are dead in the fleet, but may be reconnected."""
        return self.to_reconnect | self._trying

    def losses(self) -> dict[str, ReplicaLoss]:
        """The replicas that were given up, until another server is attached in their place."""
        return {name: replace(loss, served_s=self.served_s[name]) for name, loss in self.given_up.items()}

    def take_unloaded(self, among: Collection[str] | None = None) -> list[str]:
        """The replicas that reply again and wait for weights, each once; with `among` none but these."""
        wanted = self.unloaded if among is None else self.unloaded & set(among)
        waiting = self.manager.in_state(wanted, STALE)
        self.unloaded.difference_update(waiting)
        return waiting

    def awaited(self) -> list[str]:
        """The dead replicas that are started again."""
        dead = self.manager.in_state(self.fleet, DEAD) if self.settings.restarts else []
        return [name for name in dead if name not in self.manager.snapshot.abandoned]

    def changed(self, view: ReplicaView, why: str) -> None:
        """A replica has another state."""
        name, now = view.replica_id, time.monotonic()
        if why == "added":  # another server
            self.served_s[name] = 0.0
            self.to_reconnect.discard(name)
            self.unproved.discard(name)
            self.given_up.pop(name, None)
        if view.state is SERVING:
            self.unproved.discard(name)
            self.serving_since.setdefault(name, now)
        elif (since := self.serving_since.pop(name, None)) is not None:
            self.served_s[name] += now - since
        if view.state is DEAD and why != "restored" and not self.stopping:
            if (detail := self.stuck.pop(name, None)) is not None:
                self._give_up(name, LossReason.STUCK, detail)
            elif self.fleet.is_late(name):
                self._give_up(name, LossReason.LATE, f"{why} (seamless.watchdog.transition_s)")
            elif why == GIVEN_UP_ELSEWHERE:  # to connect to it again may take as long, and commands would wait for that
                self._give_up(name, LossReason.UNREACHABLE, why)
            else:
                self.to_reconnect.add(name)
            self.ensure_reconnecting()

    def replied(self, replica_id: str) -> None:
        """A replica that was given up for being late is taken back, unless another server is started in its place."""
        if self._takes_back() and self._take_back(replica_id, LossReason.LATE):
            self.ensure_reconnecting()

    def ensure_reconnecting(self) -> None:
        """Reconnects to lost replicas also while no command is executed."""
        if not is_running(self.reconnecting):
            self.reconnecting = self._begin(self._reconnect_all(), "reconnecting")

    async def reconnect(self) -> bool:
        """Reconnects to the lost replicas, or gives them up; whether there was one. Never runs twice at once."""
        if not self.to_reconnect:
            return False
        assert not self._trying, "commands follow each other"
        self._trying, self.to_reconnect = self.to_reconnect, set()
        try:
            await asyncio.gather(*map(self._reconnect, self._trying & self.connections.addresses.keys()))
        finally:
            self._trying = set()
        return True

    async def _reconnect(self, name: str) -> None:
        limit = time.monotonic() + RECONNECT_S
        try:
            while (problem := await self.connections.reconnect(name)) is not None:
                if time.monotonic() > limit:
                    detail = f"no connection for {RECONNECT_S:g} s: {problem}"
                    return self._give_up(name, LossReason.UNREACHABLE, detail)
                await asyncio.sleep(RETRY_S)  # nothing notifies of a server that listens again
        except ReplicaLostError as error:
            self._give_up(name, LossReason.DIED, error.reason)

    def _give_up(self, name: str, reason: LossReason, detail: str) -> None:
        """Reconnects to this replica no more."""
        logger.error("replica %s is given up (%s): %s", name, reason, shorten(detail))
        self.counts[f"fleet/given_up/{reason}"] += 1
        self.given_up[name] = ReplicaLoss(reason, shorten(detail))
        self.connections.list_as_dead(name)

    def _take_back(self, name: str, reason: LossReason) -> bool:
        """Reconnects to a replica that was given up for this reason, and replies again; whether it does.

        It is STALE unless its memory is released: its weights are not known.
        """
        if name in self.unproved or name not in self.given_up or self.given_up[name].reason is not reason:
            return False
        logger.warning("replica %s replies again, and serves after its next weight update", name)
        self.counts[TAKEN_BACK] += 1
        del self.given_up[name]
        self.unproved.add(name)
        self.unloaded.add(name)
        self.manager.snapshot.take_back(name)
        self.to_reconnect.add(name)
        return True

    async def _reconnect_all(self) -> None:
        while self.unconnected and not self.stopping:
            async with self.manager.exclusive():  # it begins by reconnecting
                pass
        states = {view.state for view in self.fleet.view}
        if states == {DEAD} and not self.stopping and not self.awaited():
            reason = "no replica is left, so that every call would wait for ever. The log has why each one was lost"
            raise ReplicaLostError(", ".join(self.fleet), f"{reason}. A larger seamless.restarts starts them again")
        if self._unreachable() and self._takes_back() and not is_running(self.returning):
            self.returning = self._begin(self._await_returns(), "waiting for replicas")

    async def _await_returns(self) -> None:
        """Takes unreachable replicas back when they can be connected to."""
        while names := self._unreachable():
            await asyncio.sleep(RETURN_S)  # nothing notifies of a network that is whole again
            reached = [name for name in names if await self.connections.reaches(name, RETURN_S)]
            if [name for name in reached if self._take_back(name, LossReason.UNREACHABLE)]:
                self.ensure_reconnecting()

    def _unreachable(self) -> list[str]:
        """The replicas that were given up because they could not be connected to, and may be taken back."""
        found = [name for name, loss in self.given_up.items() if loss.reason is LossReason.UNREACHABLE]
        return [name for name in found if name not in self.unproved]

    def _takes_back(self) -> bool:
        """Not where the trainer starts lost replicas again, which it does by what the first data plane gave up."""
        return not self.stopping and (self.settings.mirror or not self.settings.restarts)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_failure(error)


def is_running(task: asyncio.Task[None] | None) -> bool:
    return task is not None and not task.done()
