"""What the data plane does about replicas that are lost: it reconnects, gives them up, and takes them back.

Owned state: the task that reconnects, the one that waits for unreachable replicas, which replicas were taken back
without the trainer's knowledge, and for how long the server of each has served. A replica is lost -> reconnected, or
given up -> taken back, where no other server is started in its place. `ReplicaConnections` has the state of each.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from typing import Any

from seamless_verl.data_plane.connections import ReplicaConnections
from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.errors import ReplicaLostError
from seamless_verl.rollout.manager import GIVEN_UP_ELSEWHERE, RolloutManager
from seamless_verl.rollout.replica import DEAD, SERVING, STALE, ReplicaView
from seamless_verl.rollout.restarts import LossReason, ReplicaLoss


class LostReplicas:
    """Follows replicas from their loss to their return or replacement; `on_failure` gets what fails in a task."""

    def __init__(
        self,
        settings: PlaneSettings,
        manager: RolloutManager,
        connections: ReplicaConnections,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.settings, self.manager, self.connections = settings, manager, connections
        self.fleet, self.on_failure = connections.fleet, on_failure
        self.unloaded = set[str]()  # replicas that were taken back, and that the trainer was not told of
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
        name = view.replica_id
        self._count_served(view, why)
        if view.state is SERVING:
            self.connections.unproved.discard(name)
        if view.state is DEAD and why != "restored" and not self.stopping:
            if (detail := self.connections.stuck.pop(name, None)) is not None:
                self.connections.give_up(name, LossReason.STUCK, detail)
            elif self.fleet.is_late(name):
                self.connections.give_up(name, LossReason.LATE, f"{why} (seamless.watchdog.transition_s)")
            elif why == GIVEN_UP_ELSEWHERE:  # to connect to it again may take as long, and commands would wait for that
                self.connections.give_up(name, LossReason.UNREACHABLE, why)
            else:
                self.connections.lost.add(name)
            self.ensure_reconnecting()

    def given_up(self) -> dict[str, ReplicaLoss]:
        """The replicas that were given up, until another server is attached in their place."""
        losses = self.connections.given_up.items()
        return {name: replace(loss, served_s=self.served_s[name]) for name, loss in losses}

    def _count_served(self, view: ReplicaView, why: str) -> None:
        name, now = view.replica_id, time.monotonic()
        if why == "added":  # another server
            self.served_s[name] = 0.0
        if view.state is SERVING:
            self.serving_since.setdefault(name, now)
        elif (since := self.serving_since.pop(name, None)) is not None:
            self.served_s[name] += now - since

    def replied(self, replica_id: str) -> None:
        """A replica that was given up for being late is taken back, unless another server is started in its place."""
        if self._takes_back() and self.connections.take_back(replica_id, LossReason.LATE):
            self.unloaded.add(replica_id)
            self.ensure_reconnecting()

    def ensure_reconnecting(self) -> None:
        """Reconnects to lost replicas also while no command is executed."""
        if not is_running(self.reconnecting):
            self.reconnecting = self._begin(self._reconnect(), "reconnecting")

    async def _reconnect(self) -> None:
        while self.connections.missing and not self.stopping:
            async with self.manager.exclusive():  # it begins by reconnecting
                pass
        states = {view.state for view in self.fleet.view}
        if states == {DEAD} and not self.stopping and not self.awaited():
            reason = "no replica is left, so that every call would wait for ever. The log has why each one was lost"
            raise ReplicaLostError(", ".join(self.fleet), f"{reason}. A larger seamless.restarts starts them again")
        if self.connections.unreachable and self._takes_back() and not is_running(self.returning):
            self.returning = self._begin(self._await_returns(), "waiting for replicas")

    async def _await_returns(self) -> None:
        """Looks for replicas that were unreachable and are no longer."""
        while names := await self.connections.await_return():
            self.unloaded.update(names)
            self.ensure_reconnecting()

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
