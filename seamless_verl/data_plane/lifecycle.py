"""How a data plane starts, continues after a death, fails and stops.

Owned state: the fleet, its calls, its rollout manager, the connections to the replicas and the gateway's sessions.

The actor may die at any instant. Ray restarts it and repeats the calls that had no reply. So every method may be
repeated, and the state that a repetition needs is in the state store before a command returns.

States: STARTING -> UP -> FAILED. A restarted actor starts by itself, since agents call the gateway and not `start`.
FAILED is final: every later call raises its reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import ray

from seamless_verl.data_plane.connections import ReplicaAddress, ReplicaConnections
from seamless_verl.data_plane.group_notifier import GroupNotifier
from seamless_verl.data_plane.lost_replicas import LostReplicas
from seamless_verl.data_plane.restart import StateStore
from seamless_verl.data_plane.runner_requests import RunnerRequests
from seamless_verl.data_plane.runner_tasks import RunnerTasks
from seamless_verl.data_plane.sessions import Sessions
from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.errors import JournalError, PlaneFailedError, SeamlessError
from seamless_verl.rollout.call import Calls
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.manager import FleetSnapshot, RolloutManager
from seamless_verl.runtime.process import freeze_imports, show_log

logger = logging.getLogger(__name__)
PAUSED_SAVE_S = 5.0  # a kill makes a session's lifetime shorter by so many paused seconds at most


class PlaneLifecycle:
    """The state of a data plane, and its start, recovery, failure and stop; replicas are named `replica-<rank>`."""

    def __init__(
        self, settings: PlaneSettings, store: StateStore | None = None, paused_store: StateStore | None = None
    ) -> None:
        self.settings = settings
        self.store = store or StateStore(settings.name)
        self.paused_store = paused_store or StateStore(f"{settings.name}-paused")
        self.fleet = Fleet(
            deadline_s=settings.transition_s,
            on_change=lambda view, why: self.lost.changed(view, why),
            on_late_reply=lambda replica_id: self.lost.replied(replica_id),
        )
        self.calls = Calls(
            self.fleet,
            grammars_resume=settings.grammars_resume,
            shares=settings.shares,
            validation_first=settings.validation_first,
        )
        self.notifier = GroupNotifier(settings.max_failed_groups)
        self.connections: ReplicaConnections
        self.lost: LostReplicas
        self.manager: RolloutManager
        self.sessions: Sessions | None = None
        self.runner_tasks: RunnerTasks
        self.starting: asyncio.Task[None] | None = None
        self.saving: asyncio.Task[None] | None = None
        self.watching: asyncio.Task[None] | None = None
        self.sharing: asyncio.Task[None] | None = None
        self.failed: PlaneFailedError | None = None
        self.set_up_process()

    def set_up_process(self) -> None:
        """Shows the actor's log, and has it start itself: Ray restarts it after a death, but calls no method."""
        show_log()
        ray.get_runtime_context().current_actor.start.remote()

    async def start(self) -> str | None:
        """Listens; returns the gateway's address, without a slash at its end, if there is one."""
        await self.ensure_started()
        return None if self.sessions is None else self.sessions.gateway.url

    async def ensure_started(self) -> None:
        """Returns when it has continued where an earlier process ended; raises PlaneFailedError if it cannot."""
        if self.starting is None:
            self.starting = asyncio.create_task(self._start(), name="start")
        await asyncio.shield(self.starting)
        if self.failed is not None:
            raise PlaneFailedError(*self.failed.args)  # one exception for all callers would collect their tracebacks

    async def _start(self) -> None:
        try:
            restarted = self._recover()
            if self.settings.sessions is not None:
                self.calls.paused_time.load_state_dict((self.paused_store.get() if restarted else None) or {})
                self.saving = asyncio.create_task(self._save_paused_time(), name="saving paused time")
                self.saving.add_done_callback(self._background_ended)
                self.sessions = Sessions(self.settings.sessions, self.calls, on_failure=self.fail)
                self.runner_tasks = RunnerTasks(self.sessions, on_failure=self.fail)
                open_sessions = await self.sessions.read_journal()
                kept = await self.runner_tasks.read_leases(open_sessions)
                requests = RunnerRequests(self.runner_tasks)
                outside = {"serve_runner": requests.handle, "on_outside_refusal": requests.refused}
                await self.sessions.start(open_sessions, kept, restarted=restarted, **outside)
                await self.runner_tasks.start(restarted=restarted)
            async with self.manager.exclusive():  # saves the state: any later start is a restart
                pass
            self.watching = asyncio.create_task(self.connections.watch(), name="watching replicas")
            self.watching.add_done_callback(self._background_ended)
            if self.settings.shares:
                sharing = self.connections.share(self.calls.take_samples)
                self.sharing = asyncio.create_task(sharing, name="sharing samples")
                self.sharing.add_done_callback(self._background_ended)
            freeze_imports()
        except Exception as error:  # raised by every later call
            self.fail(error)

    def _recover(self) -> bool:
        """Continues with the state that an earlier process stored; whether there was one."""
        stored: tuple[FleetSnapshot, dict[str, ReplicaAddress]] | None = self.store.get()
        snapshot, addresses = stored or (FleetSnapshot(), {})
        settings = self.settings
        self.fleet.commit(snapshot.committed)
        self.connections = ReplicaConnections(
            self.fleet,
            snapshot,
            addresses,
            token=settings.token,
            capacity=settings.capacity,
            mirror=settings.mirror,
            reply_s=settings.transition_s,
        )
        self.manager = RolloutManager(
            self.fleet,
            snapshot,
            save=lambda: self.store.put((snapshot, self.connections.addresses)),
            reconnect=lambda: self.lost.reconnect(),
            forward=self._forward,
        )
        self.lost = LostReplicas(settings, self.manager, self.connections, on_failure=self.fail)
        self.lost.ensure_reconnecting()
        return stored is not None

    async def _save_paused_time(self) -> None:
        """Stores how long the calls of each session have waited, by which their sessions live longer."""
        stored: dict[str, float] = {}
        while True:
            await asyncio.sleep(PAUSED_SAVE_S)  # it grows all the time: a restart may lose so much of it
            if (found := self.calls.paused_time.state_dict()) != stored:
                await self.paused_store.put(stored := found)

    def fail(self, error: BaseException) -> None:
        """Fails the data plane for good: calls that wait, and later ones, raise the reason."""
        if self.failed is None:
            self.failed = PlaneFailedError(self.settings.name, f"{type(error).__name__}: {error}")
            logger.critical("%s", self.failed, exc_info=None if isinstance(error, SeamlessError) else error)
            self.notifier.wake()

    async def stop(self) -> None:
        """Closes the gateway and its journal, and removes the replicas; their servers, which may hang, are asked for
        nothing.
        """
        await self.ensure_started()
        if self.sessions is not None:
            assert self.saving is not None
            self.saving.cancel()
            await asyncio.wait({self.saving})
            await self.runner_tasks.stop()
            ending = asyncio.create_task(self.sessions.stop())
            await asyncio.sleep(0)  # now the gateway takes no further connection
            self.runner_tasks.end_polls()
            await ending
            self.sessions = None
        self.lost.stop()
        for task in (self.watching, self.sharing):
            if task is not None:
                task.cancel()
        for replica_id in list(self.fleet):
            self.fleet.lost(replica_id, "the run ends")
            await self.fleet.remove(replica_id)
        await self.store.clear()
        await self.paused_store.clear()

    @asynccontextmanager
    async def _journaling(self) -> AsyncGenerator[Sessions, None]:
        """The sessions; an error of their journal fails the data plane."""
        await self.ensure_started()
        assert self.sessions is not None
        try:
            yield self.sessions
        except JournalError as error:
            self.fail(error)
            raise

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _forward(self, command: str, *arguments: Any) -> list[Any]:
        return await self._on_others("execute", command, *arguments)

    async def _on_others(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the other data planes, if there are any; returns their replies."""
        others = [ray.get_actor(name) for name in self.settings.others]
        return list(await asyncio.gather(*(getattr(other, method).remote(*arguments) for other in others)))
