"""The data plane's actor, which runs the calls of a fleet and, with a gateway, its sessions and journal.

The trainer commands the rollout manager through `execute`; agent loops generate, and open and close sessions. How it
starts, dies and fails, and which state it owns, is in `lifecycle`: every method may be repeated.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain
from typing import Any

import ray

from seamless_verl.data_plane.connections import ReplicaAddress
from seamless_verl.data_plane.finished_sessions import (
    NO_NOTE,
    AgentResult,
    FinishedSession,
    HandedNote,
    TakenUpSession,
)
from seamless_verl.data_plane.group_notifier import GroupEnd
from seamless_verl.data_plane.lease_book import TaskOrder, TaskResult
from seamless_verl.data_plane.lifecycle import PlaneLifecycle
from seamless_verl.data_plane.lost_replicas import LOSS_METRICS
from seamless_verl.data_plane.lost_sessions import end_left
from seamless_verl.data_plane.restart import StateStore
from seamless_verl.data_plane.settings import Generated, PlaneSettings
from seamless_verl.data_plane.waits import PlaneState, PlaneWaits, plane_waits
from seamless_verl.errors import ReplicaLostError
from seamless_verl.journal import GroupDecided
from seamless_verl.rollout.call import Call
from seamless_verl.rollout.manager import COMMANDS
from seamless_verl.rollout.observation import CACHE_METRICS, RolloutObservation
from seamless_verl.rollout.replica import PAUSED, RELEASED, SERVING, SYNCING, ReplicaState
from seamless_verl.rollout.restarts import ReplicaLoss
from seamless_verl.runtime.process import stack_report
from seamless_verl.trajectory.account import DropReason, drop_masked
from seamless_verl.trajectory.records import Finish
from seamless_verl.trajectory.routes import Routes, joined

STREAM_INTERVAL = 64  # tokens in a chunk of a call whose reader waits for the end
STATE_METRICS = {f"fleet/{state}" for state in ReplicaState} | LOSS_METRICS | CACHE_METRICS
"""The same in every data plane."""


class DataPlane(PlaneLifecycle):
    """A plain class, made an actor where it is started."""

    def __init__(
        self, settings: PlaneSettings, store: StateStore | None = None, paused_store: StateStore | None = None
    ) -> None:
        self.commands = dict[object, tuple[str, float]]()  # that have not ended, and when they came
        self.generating = dict[asyncio.Task[Any], str]()  # calls of `generate`, each with its group
        self.masked: Counter[DropReason] = Counter()  # tokens that the trainer masked
        super().__init__(settings, store, paused_store)

    # The trainer's side

    async def attach(self, replica_id: str, host: str, port: int, server: Any) -> None:
        """Connects to a replica that listens, also in the place of a dead one; it serves after its next update."""
        await self.ensure_started()
        async with self.manager.exclusive():
            if await self.connections.attach(ReplicaAddress(replica_id, host, port, server)):
                self.calls.replica_began(replica_id)
            await self._on_others("attach", replica_id, host, port, server)

    async def begin_run(self, run: str, version: int) -> None:
        """The trainer begins, or goes on from the weights of `version`, before any session."""
        async with self._journaling() as sessions:
            await sessions.earlier.begin(run, version)
            await self.runner_tasks.begin_run(run, version)
            sessions.lost.bound(version)  # also of leases that expired meanwhile

    async def given_up(self) -> dict[str, ReplicaLoss]:
        """The replicas that were given up, until another server is attached in their place."""
        await self.ensure_started()
        return self.lost.losses()

    async def taken_back(self, among: Collection[str] | None = None) -> list[str]:
        """The replicas that reply again and wait for weights, each once: the trainer may load them before a commit.

        One that only another data plane lost waits there: it is among them if it serves here, since a second load costs
        little.
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
        """Metrics of all data planes, after their laws were checked and a replica was found to serve.

        None need serve while replicas are `loading` or started again, while training has the devices of some, or where
        a command of the first data plane, which was killed within it and is repeated, had stopped the routing here.

        Raises IntegrityError, and ReplicaLostError where no replica serves or will, so that calls would wait for ever.
        """
        await self.ensure_started()
        async with self.manager.exclusive():
            self.check_integrity()
            paused = self.manager.in_state(self.manager.snapshot.training, PAUSED)
            stopped = self.settings.mirror and self.manager.in_state(self.fleet, PAUSED, SYNCING)
            serving = self.manager.in_state(self.fleet, SERVING, RELEASED)
            loads = loading or self.manager.loading
            if not (loads or paused or stopped or serving or self.lost.awaited()):
                raise ReplicaLostError(", ".join(self.fleet), f"no replica serves version {self.fleet.committed}")
            return self._of_all([await self.metrics(), *await self._on_others("checked_metrics", loading)])

    async def live_metrics(self) -> dict[str, float]:
        """The same at any moment, also within a command of the trainer."""
        await self.ensure_started()
        return self._of_all([await self.metrics(), *await self._on_others("metrics")])

    def _of_all(self, metrics: list[dict[str, float]]) -> dict[str, float]:
        summed = sum_metrics(metrics)
        for reason, tokens in self.masked.items():
            summed = drop_masked(summed, tokens, reason)
        return summed

    def count_masked(self, tokens: int, reason: DropReason = DropReason.STALE) -> None:
        """Counts tokens that the trainer masked; called on the first data plane, for those of all."""
        self.masked[reason] += tokens

    async def metrics(self) -> dict[str, float]:
        """Metrics of this data plane alone."""
        metrics = self.fleet.metrics() | self.calls.metrics() | self.notifier.metrics()
        metrics |= {name: float(count) for name, count in self.lost.counts.items()}
        metrics |= self.connections.cache_use.metrics()
        if self.sessions is None:
            return metrics
        return metrics | await self.sessions.checked_metrics() | self.runner_tasks.metrics()

    def check_integrity(self) -> None:
        """Raises IntegrityError where a conservation law of fleet or calls does not hold."""
        self.fleet.check_integrity()
        self.calls.check_integrity()

    async def wait_for_groups(self, seen: int, timeout_s: float, enough: int = 1) -> int:
        """As `GroupNotifier.wait`; raises GroupsFailedError when too many groups failed one after another."""
        await self.ensure_started()
        count = await self.notifier.wait(seen, timeout_s, enough)
        await self.ensure_started()
        self.notifier.check()
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
            self.lost.stuck[replica_id] = detail
            self.fleet.lost(replica_id, detail)
        await self._on_others("give_up", replica_id, detail)
        return True

    async def stack_report(self) -> str:
        """Replicas, calls, and every task of this process, as text."""
        state = {**self.calls.metrics(), "training has": sorted(self.manager.snapshot.training)}
        return "\n".join([*map(str, self.fleet.view), str(state), stack_report(asyncio.get_running_loop())])

    # The agent loops' side

    @ray.method(enable_task_events=False)  # else Ray tells its GCS of each call, an eighth of what it takes
    async def generate(
        self,
        name: str,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        group: str = "",
        validation: bool = False,
        media: bytes = b"",
        routes_from: int | None = None,
    ) -> Generated:
        """Runs one call to its end; raises CallError if it failed for good.

        `sampling` has vLLM's fields; calls of one `name` prefer the same replica. `group` is the uid of its prompt, ""
        for none; a `validation` is not trained; `media` and `routes_from` are those of EngineRequest.
        """
        task = asyncio.current_task()
        assert task is not None
        self.generating[task] = group
        try:
            await self.ensure_started()
            fields = {"stream_interval": STREAM_INTERVAL, **sampling}
            of = {"key": name, "group": group, "validation": validation}
            call = Call(name, array("i", prompt_ids), fields, media=media, routes_from=routes_from, **of)
            generated, routes = Generated(), list[Routes | None]()
            async with aclosing(self.calls.stream(call)) as chunks:
                async for chunk in chunks:
                    generated.ids.extend(chunk.ids)
                    generated.logprobs.extend(chunk.logprobs)
                    generated.versions.extend([chunk.version] * len(chunk.ids))
                    routes += [chunk.prompt_routes] if chunk.prompt_routes is not None else []
                    routes += [chunk.routes] if chunk.ids else []
                    if chunk.error is not None:
                        raise chunk.error
                    generated.finish = chunk.finish_reason or Finish.FAILED
            generated.routes = joined(routes)
            return generated
        finally:
            del self.generating[task]

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
        await self.ensure_started()
        if self.sessions is None:
            return []
        async with self._journaling() as sessions:
            await sessions.settled()
            return sessions.accounts.handed_over(uids)

    async def loops_lost(
        self, uids: Sequence[str], complete: Sequence[str], unwanted: Mapping[str, DropReason]
    ) -> None:
        """The agent loops of these prompts are gone; those of `complete` had put all rows. See `end_left`.

        Their calls of `generate` end before this returns: whoever begins the prompts again has calls of its own.
        """
        await self.ensure_started()
        if left := {task for task, group in self.generating.items() if group in uids}:
            for task in left:
                task.cancel()
            await asyncio.wait(left)
        if self.sessions is None:
            return
        async with self._journaling() as sessions:
            await end_left(sessions, self.runner_tasks, set(uids), set(complete), unwanted)

    async def run_task(self, order: TaskOrder) -> TaskResult:
        """Has a runner do the task; returns how it ended, the same if it is repeated. A cancellation withdraws the
        task.
        """
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
        self.notifier.notify(end)


def sum_metrics(metrics: list[dict[str, float]]) -> dict[str, float]:
    """Sums the data planes' metrics; the states of the replicas, which they share, are those of the first."""
    total = Counter(metrics[0])
    for more in metrics[1:]:
        total.update({name: value for name, value in more.items() if name not in STATE_METRICS})
    return dict(total)
