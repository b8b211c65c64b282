"""The data plane's actor, which runs the calls of a fleet and, with a gateway, its sessions and journal.

Owned state: the fleet, its calls, its rollout manager, the connections to the replicas and the gateway's sessions.
The trainer commands the rollout manager through `execute`; agent loops generate, and open and close sessions.

The actor may die at any instant. Ray restarts it and repeats the calls that had no reply. So every method may be
repeated, and the state that a repetition needs is in the state store before a command returns.

States: STARTING -> UP -> FAILED. A restarted actor starts by itself, since agents call the gateway and not `start`.
FAILED is final: every later call raises its reason.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import ray

from seamless_verl.data_plane import lost_loops
from seamless_verl.data_plane.connections import LOSS_METRICS, ReplicaAddress, ReplicaConnections
from seamless_verl.data_plane.earlier_sessions import AgentResult
from seamless_verl.data_plane.finished_sessions import NO_NOTE, FinishedSession, HandedNote, TakenUpSession
from seamless_verl.data_plane.group_notifier import ConsecutiveFailures, GroupCounts, GroupEnd, GroupNotifier
from seamless_verl.data_plane.lost_loops import Left
from seamless_verl.data_plane.lost_replicas import LostReplicas
from seamless_verl.data_plane.restart import StateStore
from seamless_verl.data_plane.runner_requests import RunnerRequests
from seamless_verl.data_plane.runner_tasks import RunnerTasks
from seamless_verl.data_plane.sessions import Sessions
from seamless_verl.data_plane.settings import Generated, PlaneSettings
from seamless_verl.data_plane.tasks import TaskOrder, TaskResult
from seamless_verl.data_plane.waits import PlaneState, PlaneWaits, plane_waits
from seamless_verl.errors import JournalError, PlaneFailedError, ReplicaLostError
from seamless_verl.journal import GroupDecided
from seamless_verl.rollout.cache_use import CACHE_METRICS
from seamless_verl.rollout.call import Call, Calls
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.manager import COMMANDS, FleetSnapshot, RolloutManager
from seamless_verl.rollout.observation import RolloutObservation
from seamless_verl.rollout.replica_state import PAUSED, RELEASED, SERVING, SYNCING, ReplicaState
from seamless_verl.rollout.restarts import ReplicaLoss
from seamless_verl.rollout.routing import PrefixAffinity
from seamless_verl.runtime.process import freeze_imports, show_log, stack_report
from seamless_verl.trajectory.account import DropReason, drop_masked
from seamless_verl.trajectory.records import Finish

logger = logging.getLogger(__name__)
PAUSED_SAVE_S = 5.0  # a kill makes a session's lifetime shorter by so many paused seconds at most
STREAM_INTERVAL = 64  # tokens in a chunk of a call whose reader waits for the end
STATE_METRICS = {f"fleet/{state}" for state in ReplicaState} | LOSS_METRICS | CACHE_METRICS
"""The same in every data plane."""


class DataPlane:
    """A plain class, made an actor where it is started; replicas are named `replica-<rank>`."""

    def __init__(
        self, settings: PlaneSettings, store: StateStore | None = None, paused_store: StateStore | None = None
    ) -> None:
        self.settings = settings
        self.store = store or StateStore(settings.name)
        self.paused_store = paused_store or StateStore(f"{settings.name}-paused")
        self.fleet = Fleet(
            policy=PrefixAffinity(),
            deadline_s=settings.transition_s,
            on_change=lambda view, why: self.lost.changed(view, why),
            on_late_reply=lambda replica_id: self.lost.replied(replica_id),
        )
        self.calls = Calls(self.fleet, grammars_resume=settings.grammars_resume)
        self.notifier, self.failures = GroupNotifier(), ConsecutiveFailures(settings.max_failed_groups)
        self.groups = GroupCounts()
        self.connections: ReplicaConnections
        self.lost: LostReplicas
        self.manager: RolloutManager
        self.sessions: Sessions | None = None
        self.runner_tasks: RunnerTasks
        self.starting: asyncio.Task[None] | None = None
        self.saving: asyncio.Task[None] | None = None
        self.watching: asyncio.Task[None] | None = None
        self.commands = dict[object, tuple[str, float]]()  # that have not ended, and when they came
        self.failed: PlaneFailedError | None = None
        self.masked: Counter[DropReason] = Counter()  # tokens that the trainer masked
        self.set_up_process()

    def set_up_process(self) -> None:
        """Shows the actor's log, and has it start itself: Ray restarts it after a death, but calls no method."""
        show_log()
        ray.get_runtime_context().current_actor.start.remote()

    # Lifecycle

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
            raise self.failed

    async def _start(self) -> None:
        try:
            restarted = self._recover()
            if self.settings.sessions is not None:
                self.calls.paused_time.load_state_dict((self.paused_store.get() if restarted else None) or {})
                self.saving = asyncio.create_task(self._save_paused_time(), name="saving paused time")
                self.saving.add_done_callback(self._background_ended)
                self.sessions = Sessions(self.settings.sessions, self.calls, on_failure=self.fail)
                self.runner_tasks = RunnerTasks(self.sessions, on_failure=self.fail)
                await self.sessions.start(restarted=restarted, outside=RunnerRequests(self.runner_tasks))
                await self.runner_tasks.start(restarted=restarted)
            async with self.manager.exclusive():  # saves the state: any later start is a restart
                pass
            self.watching = asyncio.create_task(self.connections.watch(), name="watching replicas")
            self.watching.add_done_callback(self._background_ended)
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
            reconnect=self.connections.reconnect,
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
            logger.critical("%s", self.failed, exc_info=error)
            self.notifier.wake()

    async def stop(self) -> None:
        """Closes the gateway and its journal, and removes the replicas."""
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
        if self.watching is not None:
            self.watching.cancel()
        for replica_id in list(self.fleet):
            await self.fleet.remove(replica_id)
        await self.store.clear()
        await self.paused_store.clear()

    # The trainer's side

    async def attach(self, replica_id: str, host: str, port: int, server: Any) -> None:
        """Connects to a replica that listens, also in the place of a dead one; it serves after its next update."""
        await self.ensure_started()
        async with self.manager.exclusive():
            await self.connections.attach(ReplicaAddress(replica_id, host, port, server))
            await self._on_others("attach", replica_id, host, port, server)

    async def begin_run(self, run: str, version: int) -> None:
        """The trainer begins, or goes on from the weights of `version`, before any session; called on every data plane.

        The gateway's sessions of the run's earlier starts may be taken up from now on, or end.
        """
        async with self._journaling() as sessions:
            await sessions.earlier.begin(run, version)
            await self.runner_tasks.begin_run(run, version)
            sessions.lost.bound(version)  # also of leases that expired meanwhile

    async def given_up(self) -> dict[str, ReplicaLoss]:
        """The replicas that were given up, until another server is attached in their place."""
        await self.ensure_started()
        return self.lost.given_up()

    async def taken_back(self, among: Collection[str] | None = None) -> list[str]:
        """The replicas that reply again and wait for weights, each once: the trainer may load them before a commit.

        One that another data plane lost, and this one did not, waits there: it is among them if it serves here, for
        to load it again takes next to nothing.
        """
        await self.ensure_started()
        own = self.lost.take_unloaded(among)
        others = await self._on_others("taken_back", self.manager.in_state(self.fleet, SERVING))
        return list(dict.fromkeys(chain(own, *others)))

    async def abandon(self, replica_id: str) -> None:
        """This lost replica is not started again; if no other one is left, the data plane fails."""
        await self.ensure_started()
        async with self.manager.exclusive():
            self.manager.snapshot.abandoned.add(replica_id)
            await self._on_others("abandon", replica_id)
        self.lost.ensure_reconnecting()

    async def execute(self, command: str, *arguments: Any) -> Any:
        """Executes a command of the rollout manager, by name; RolloutManager says what it returns and raises."""
        await self.ensure_started()
        assert command in COMMANDS, command
        running = object()
        self.commands[running] = command, time.monotonic()
        try:
            return await getattr(self.manager, command)(*arguments)
        finally:
            del self.commands[running]

    async def checked_metrics(self, loading: bool = False) -> dict[str, float]:
        """Metrics of all data planes, after their conservation laws were checked and a replica was found to serve.

        While replicas are `loading` or are started again, or training has the devices of some, none need serve. Nor
        where the first data plane was killed within a command that had stopped the routing here: its successor, which
        asks, looks at its own replicas, and the command is repeated.

        Raises:
            IntegrityError: a law does not hold.
            ReplicaLostError: no replica serves or will, so that every call would wait for ever.
        """
        await self.ensure_started()
        async with self.manager.exclusive():
            self.check_integrity()
            paused = self.manager.in_state(self.manager.snapshot.training, PAUSED)
            stopped = self.settings.mirror and self.manager.in_state(self.fleet, PAUSED, SYNCING)
            serving = self.manager.in_state(self.fleet, SERVING, RELEASED)
            if not (loading or paused or stopped or serving or self.lost.awaited()):
                raise ReplicaLostError(", ".join(self.fleet), f"no replica serves version {self.fleet.committed}")
            metrics = sum_metrics([await self.metrics(), *await self._on_others("checked_metrics", loading)])
            for reason, tokens in self.masked.items():
                metrics = drop_masked(metrics, tokens, reason)
            return metrics

    def count_masked(self, tokens: int, reason: DropReason = DropReason.STALE) -> None:
        """Counts tokens that the trainer masked; called on the first data plane, for those of all.

        The count begins again when the first data plane does.
        """
        self.masked[reason] += tokens

    async def metrics(self) -> dict[str, float]:
        """Metrics of this data plane alone."""
        metrics = self.fleet.metrics() | self.calls.metrics() | self.groups.metrics()
        metrics |= {name: float(count) for name, count in self.connections.counts.items()}
        metrics |= self.connections.cache_use.metrics()
        if self.sessions is None:
            return metrics
        return metrics | await self.sessions.checked_metrics() | self.runner_tasks.metrics()

    def check_integrity(self) -> None:
        """Raises IntegrityError where a conservation law of fleet or calls does not hold."""
        self.fleet.check_integrity()
        self.calls.check_integrity()

    async def wait_for_groups(self, seen: int, timeout_s: float) -> int:
        """How many groups have finished, as soon as that is not `seen` or `timeout_s` seconds have passed.

        Raises:
            GroupsFailedError: too many groups failed one after another.
        """
        await self.ensure_started()
        count = await self.notifier.wait(seen, timeout_s)
        await self.ensure_started()
        self.failures.check()
        return count

    async def observe(self, urgent: Collection[str]) -> RolloutObservation:
        """The load of each replica now, with the calls counted that are of these groups, by their prompts' uids."""
        await self.ensure_started()
        return self.calls.observe(frozenset(urgent), self.notifier.count)

    async def progress(self) -> float:
        """A count of calls and tokens, which grows as long as anything is generated."""
        return sum(self.calls.metrics().values())

    async def waits(self) -> PlaneWaits:
        """What waits here, for the watchdog."""
        await self.ensure_started()
        now = time.monotonic()
        commands = {name: now - since for name, since in reversed(self.commands.values())}
        state = PlaneState(self.fleet, self.calls, self.manager.snapshot.training, commands)
        if self.sessions is not None:
            table = self.sessions.gateway.table
            state = replace(state, quiet_s=table.quiet_s(), uids={one.session_id: one.uid for one in table})
        return plane_waits(state)

    async def give_up(self, replica_id: str, detail: str) -> bool:
        """Gives up a replica that gives no tokens, in all data planes; False where its calls would continue nowhere."""
        await self.ensure_started()
        others = [name for name in self.manager.in_state(self.fleet, SERVING) if name != replica_id]
        if not (self.settings.mirror or self.settings.restarts or others):
            return False
        if self.manager.in_state([replica_id], SERVING):
            self.connections.stuck[replica_id] = detail
            self.fleet.lost(replica_id, detail)
        await self._on_others("give_up", replica_id, detail)
        return True

    async def stack_report(self) -> str:
        """Replicas, calls, and every task of this process, as text."""
        state = {**self.calls.metrics(), "training has": sorted(self.manager.snapshot.training)}
        return "\n".join([*map(str, self.fleet.view), str(state), stack_report(asyncio.get_running_loop())])

    # The agent loops' side

    async def generate(
        self, name: str, prompt_ids: list[int], sampling: dict[str, Any], group: str = "", validation: bool = False
    ) -> Generated:
        """Runs one call to its end. `sampling` has vLLM's fields; calls of one `name` prefer the same replica.

        `group` is the uid of the prompt that it is for, "" for none; `validation` says that it is not trained.

        Raises:
            CallError: the call failed for good.
        """
        await self.ensure_started()
        fields = {"stream_interval": STREAM_INTERVAL, **sampling}
        call = Call(name, array("i", prompt_ids), fields, key=name, group=group, validation=validation)
        generated = Generated()
        async with aclosing(self.calls.stream(call)) as chunks:
            async for chunk in chunks:
                generated.ids.extend(chunk.ids)
                generated.logprobs.extend(chunk.logprobs)
                generated.versions.extend([chunk.version] * len(chunk.ids))
                if chunk.error is not None:
                    raise chunk.error
                generated.finish = chunk.finish_reason or Finish.FAILED
        return generated

    async def open_session(self, body: dict[str, Any]) -> dict[str, Any]:
        """Opens a session; `body` is that of POST /admin/sessions."""
        async with self._journaling() as sessions:
            return await sessions.open(body)

    async def close_session(self, session_id: str, reason: str, result: AgentResult | None = None) -> FinishedSession:
        """Ends a session and returns its result; a repetition returns the same, until it is acknowledged."""
        async with self._journaling() as sessions:
            return await sessions.close(session_id, reason, self.fleet.committed, result)

    async def prompts_to_take_up(self) -> frozenset[str]:
        """The uids of prompts of which sessions of an earlier start of this run may be taken up."""
        async with self._journaling() as sessions:
            return sessions.earlier.uids

    async def take_up_session(self, uid: str, sample: str, submitted: int) -> TakenUpSession | None:
        """The ended session of an earlier start at this place of a group; see `Sessions.take_up`."""
        async with self._journaling() as sessions:
            return await sessions.take_up(uid, sample, submitted, self.fleet.committed)

    async def acknowledge(self, session_id: str, kept: bool = True, note: HandedNote | None = None) -> None:
        """The result of a closed session was stored for training, or, not `kept`, dropped: it is not returned again."""
        async with self._journaling() as sessions:
            await sessions.acknowledge(session_id, kept, note or NO_NOTE)
            self.runner_tasks.forget(session_id)

    async def handed_over(self, uids: Sequence[str]) -> list[str]:
        """Of these prompts, those with a session that was acknowledged as kept, and whose outcome is not known yet."""
        async with self._journaling() as sessions:
            await sessions.settled()
            return sessions.accounts.handed_over(uids)

    async def loops_lost(
        self, uids: Sequence[str], complete: Sequence[str], unwanted: Mapping[str, DropReason]
    ) -> None:
        """The agent loops of these prompts are gone; those of `complete` had put all rows. See `lost_loops`."""
        async with self._journaling() as sessions:
            await lost_loops.leave(sessions, self.runner_tasks, Left(set(uids), set(complete), unwanted))

    async def run_task(self, order: TaskOrder) -> TaskResult:
        """Has a runner do the task; returns how it ended. A repetition returns the same, until its session is
        acknowledged; a cancellation withdraws the task."""
        async with self._journaling():
            self.calls.group_began(str(order.opening.get("uid", "")))  # however late a runner takes it
            return await self.runner_tasks.run(order)

    async def record_groups(self, groups: Sequence[GroupDecided]) -> None:
        """What became of groups of sessions; called on every data plane, for the groups of all."""
        async with self._journaling() as sessions:
            await sessions.record_groups(groups)

    async def paused_seconds(self, session_id: str) -> float:
        """Seconds in which a call of this session waited for a replica, or was on one that was paused."""
        await self.ensure_started()
        return self.calls.paused_time.seconds(session_id)

    async def notify_group_ended(self, end: GroupEnd) -> None:
        """A group of sessions has ended. Called on the first data plane, for the sessions of all."""
        if not end.deferred:
            self.failures.add(end.error)
        self.groups.add(end)
        self.notifier.notify()

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

    # The other data planes

    async def _forward(self, command: str, *arguments: Any) -> list[Any]:
        return await self._on_others("execute", command, *arguments)

    async def _on_others(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the other data planes, if there are any; returns their replies."""
        others = [ray.get_actor(name) for name in self.settings.others]
        return list(await asyncio.gather(*(getattr(other, method).remote(*arguments) for other in others)))


def sum_metrics(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Sums the data planes' metrics; the states of the replicas, which they share, are those of the first."""
    total = Counter(metrics[0])
    for more in metrics[1:]:
        total.update({name: value for name, value in more.items() if name not in STATE_METRICS})
    return dict(total)
