"""Tasks for runners: processes outside of the run that lease tasks and run agents on them (`runner_requests.py`).

Owned state: the lease book, the order and the result of each of its tasks, the session of each lease, and the leases of
an earlier start of the run that no agent loop has asked for. A session is opened when its task is leased. It ends with
its lease: a completed one is left to the agent loop, any other is closed and dropped, and its task is queued again.

A runner outlives the run: it repeats what got no reply until the run is back. Its lease is restored, with the session
that is open in the journal; the agent loop that submits the same place of the same group gets the task of that lease.

Invariants:
- A lease is in the journal before a runner receives it, and a result before its runner gets a reply. So a restarted
  data plane continues with the leases of the earlier one, and knows the results that it accepted.
- The end of a lease is in the journal before the next lease of its task.
- Between two awaits a task may be withdrawn: what follows an await looks whether the task is still there.
- A task's result is returned as often as its agent loop asks for it, until its session is acknowledged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from seamless_verl.client.messages import TaskLease
from seamless_verl.data_plane.earlier_sessions import SAMPLE, STEP, BegunAgain, Place, place_of, run_of
from seamless_verl.data_plane.lease_book import (
    DONE,
    LEASED,
    LOST,
    QUEUED,
    TERMINAL,
    UNCLAIMED,
    WITHDRAWN,
    EndedLease,
    LeaseBook,
    LeasedTask,
    TaskOrder,
    TaskResult,
)
from seamless_verl.data_plane.lease_record import (
    NO_RUNNER,
    UNWANTED,
    LeaseSessions,
    LiveLease,
    done,
    event,
    live_leases,
)
from seamless_verl.data_plane.sessions import Sessions
from seamless_verl.errors import JournalError, LeaseError
from seamless_verl.journal import BEGUN, OutsideEvent, SessionSummary, StoredSession
from seamless_verl.runtime.process import AwakeTime, WholeWork

logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
TASK = "runner_task"  # in a session's metadata


def whole(
    method: Callable[Concatenate[RunnerTasks, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[RunnerTasks, P], Coroutine[Any, Any, T]]:
    """All of the method is done if its caller is cancelled meanwhile."""

    @wraps(method)
    async def done_whole(self: RunnerTasks, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.work.do(method(self, *args, **kwargs))

    return done_whole


class TaskPolls:
    """Requests of runners that wait for a task, in the order in which they came: a queued task wakes one of them."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Future[str], Collection[str]] = {}

    async def wait(self, agents: Collection[str]) -> None:
        """Until a task for one of these agents may be there; another request can have taken it.

        Cancelled at the moment at which it is woken, it wakes another one.
        """
        woken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[woken] = agents
        try:
            await woken
        except asyncio.CancelledError:
            if woken.done() and not woken.cancelled():
                self.offer(woken.result())
            raise
        finally:
            self._waiting.pop(woken, None)

    def offer(self, agent: str) -> None:
        """A task for this agent is queued: wakes the request that has waited longest of those that can take it."""
        for woken, agents in self._waiting.items():
            if agent in agents and not woken.done():
                woken.set_result(agent)
                del self._waiting[woken]
                return

    def wake_all(self) -> None:
        """Nothing more will be queued."""
        for woken in self._waiting:
            if not woken.done():
                woken.set_result("")
        self._waiting.clear()

    def __len__(self) -> int:
        return len(self._waiting)


class RunnerTasks:
    """The tasks of one data plane.

    `now` is the clock of their leases, by default one that stands still while this process cannot hear the runners;
    `on_failure` gets an error of the journal, and the one that ends the expiry of leases.
    """

    def __init__(
        self,
        sessions: Sessions,
        *,
        now: Callable[[], float] | None = None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.sessions, self.leases, self._on_failure = sessions, LeaseBook(), on_failure
        self.awake = AwakeTime()
        self._now = now or self.awake
        self.sooner = asyncio.Event()  # a deadline is sooner than the one that the expiry waits for
        self._until: float | None = None  # that one
        self._background: list[asyncio.Task[None]] = []
        self._orders: dict[str, TaskOrder] = {}
        self._results: dict[str, asyncio.Future[TaskResult]] = {}
        self.lease_sessions = LeaseSessions(sessions)
        self.restored: list[LiveLease] = []
        self.kept_open: dict[str, SessionSummary] = {}  # sessions of restored leases that a run opened, by their ids
        self._earlier: dict[Place, tuple[str, SessionSummary]] = {}  # tasks of restored leases that no loop asked for
        self.carried_on = 0
        self._polls, self._started = TaskPolls(), asyncio.Event()
        self.work, self._over = WholeWork(), False

    async def read_leases(self, open_sessions: Sequence[StoredSession]) -> Collection[str]:
        """Reads the leases of earlier processes; returns those of these sessions that stay open for their runners."""
        self.restored = live_leases(await asyncio.to_thread(self.sessions.journal.open_leases))
        live = {lease.session_id for lease in self.restored}
        kept = [one for one in open_sessions if one.session_id in live and run_of(one) is not None]
        self.kept_open = {one.session_id: one.summary() for one in kept}
        return self.kept_open.keys()

    async def start(self, *, restarted: bool) -> None:
        """Continues with the leases of an earlier process, also of an earlier start of the run, until `begin_run`."""
        self.restored = [live for live in self.restored if live.session_id in self.sessions.closed]
        for live in self.restored:
            self._restore(live)
        for session_id in [name for name in self.sessions.closed if name not in self.lease_sessions]:
            if TASK in self.sessions.gateway.table.get(session_id).metadata:
                await self.sessions.drop(session_id, *NO_RUNNER)
        if not restarted:
            await self.record(event(BEGUN, "", {}), *(found for live in self.restored for found in live.events()))
        self._started.set()
        for name, work in (("clock of leases", self.awake.run()), ("expiry of leases", self._expire())):
            self._background.append(asyncio.create_task(work, name=name))
            self._background[-1].add_done_callback(self._background_ended)

    def _restore(self, live: LiveLease) -> None:
        self.leases.restore(live.task_id, live.terms, live.lease_id, live.runner, live.attempt, self._now())
        self.lease_sessions.add(live.lease_id, live.task_id, live.session_id)
        if (session := self.kept_open.get(live.session_id)) is not None:
            self._earlier[place_of(session)] = (live.task_id, session)
        if live.outcome is not None:
            task = self.leases.complete(live.lease_id, self._now())
            self._resolve(task, TaskResult(DONE, task.attempts, live.session_id, live.outcome))

    async def stop(self) -> None:
        """Ends the expiry; leases that runners still hold are of no use to them."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.work.ended()

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    def end_polls(self) -> None:
        """Runners that wait for a task get none, and ask again in vain: the run is over."""
        self._over = True
        self._polls.wake_all()

    async def begin_run(self, run: str, version: int) -> None:
        """The run goes on from these weights: ends the leases of earlier starts that it cannot go on with."""
        refused = []
        for place, (task_id, session) in list(self._earlier.items()):
            newer = session.newest is not None and session.newest > version
            if run_of(session) != run or newer:
                del self._earlier[place]
                refused.append((task_id, session))
        for task_id, session in refused:
            if run_of(session) == run:
                self.sessions.earlier.count(BegunAgain.NEWER_WEIGHTS, session.tokens)
                if task_id in self.leases:  # it may have expired
                    self.lease_sessions.lose(self.leases[task_id].lease_id, version)
            await self._withdraw(task_id)

    # The agent loops' side

    async def run(self, order: TaskOrder) -> TaskResult:
        """Has the task done by a runner; returns how it ended, the same when it is repeated. Cancelled, it is
        withdrawn.
        """
        order = await self._of_earlier_lease(order)
        task_id = order.task_id
        self._orders[task_id] = order
        if task_id not in self.leases:
            self.leases.submit(task_id, order.terms, self._now())
        result = self._results.setdefault(task_id, asyncio.get_running_loop().create_future())
        self._offer(self.leases[task_id])
        try:
            return await asyncio.shield(result)
        except asyncio.CancelledError:
            await self._withdraw(task_id)
            raise

    async def _of_earlier_lease(self, order: TaskOrder) -> TaskOrder:
        """The order for the task of a lease that an earlier start gave for the same place, if there is one."""
        metadata = order.opening.get("metadata", {})
        place, step = (str(order.opening.get("uid")), str(metadata.get(SAMPLE))), metadata.get(STEP)
        found = None if order.task_id in self.leases else self._earlier.pop(place, None)
        if found is None or found[0] not in self.leases:
            return order
        task_id, session = found
        if step is not None and session.oldest is not None and session.oldest < step - 1:
            self.sessions.earlier.count(BegunAgain.OLDER_WEIGHTS, session.tokens)
            await self._withdraw(task_id)
            return order
        self.carried_on += 1
        return replace(order, task_id=task_id)

    async def release(self, uids: Collection[str], unwanted: Collection[str], handing: Collection[str]) -> None:
        """The agent loops of these prompts are gone: leases go on for the next that asks; other tasks, and those of
        the `unwanted`, are withdrawn. Sessions whose results are `handing` over stay as they are.
        """
        for task_id in [name for name, order in self._orders.items() if str(order.opening.get("uid")) in uids]:
            session_id = self.lease_sessions.of(self.leases[task_id].lease_id) if task_id in self.leases else ""
            if session_id in handing:  # it has ended, and is taken up or dropped as any session
                continue
            if session_id not in self.sessions.closed or self._orders[task_id].opening.get("uid") in unwanted:
                asked = self._results.get(task_id)
                await self._withdraw(task_id)
                if asked is not None and not asked.done():
                    asked.set_result(TaskResult(WITHDRAWN, 0))  # ends the call of the loop that is gone
                continue
            stored = await asyncio.to_thread(self.sessions.journal.read, session_id)
            if stored is not None and task_id in self.leases:
                session = stored.summary()
                self._earlier[place_of(session)] = (task_id, session)

    def has(self, session_id: str) -> bool:
        """Whether it is the session of a lease, also of one that is over and whose session is being dropped."""
        return session_id in self.lease_sessions

    def forget(self, session_id: str) -> None:
        """The result of a task was stored, or dropped."""
        task = self.leases.get(self.lease_sessions.task_of(session_id))
        if task is not None and task.state is DONE and self.lease_sessions.of(task.lease_id) == session_id:
            self._forget(task)

    def metrics(self) -> dict[str, float]:
        """Tasks by state, after a check of the book."""
        self.leases.check_integrity()
        own = {"resumed/leases": float(self.carried_on)} if self.sessions.earlier.version > 0 else {}
        return self.leases.metrics() | own

    # The runners' side: each raises LeaseError for a lease that has ended

    async def started(self) -> None:
        """Returns when the leases of an earlier process are known."""
        await self._started.wait()

    async def end_given(self, lease_id: str) -> bool:
        """Ends a lease that a runner asks for again, as it did not get the first reply; False if it was not given."""
        known = self.leases.knows(lease_id)
        if known:
            await self._give_back(lease_id)
        return known

    async def lease(self, lease_id: str, runner: str, agents: frozenset[str], wait_s: float) -> TaskLease | None:
        """Gives a task of these agents to a runner, and opens its session; None if there is none for so long."""
        task_id = await self._next_task(agents, wait_s)
        if task_id is None:
            return None
        self.leases.lease(task_id, lease_id, runner, self._now())
        self._wake_expiry()
        beginning = asyncio.ensure_future(self._begin(self._orders[task_id], self.leases[task_id], lease_id))
        try:
            return await asyncio.shield(beginning)
        except BaseException:  # the runner left, or the session cannot be opened: nobody works on the task
            await self._give_back(lease_id, beginning)
            raise

    async def _next_task(self, agents: frozenset[str], wait_s: float) -> str | None:
        try:
            async with asyncio.timeout(wait_s):
                # One without an order is of an earlier process: its agent loop has not asked for it yet.
                while (task_id := self.leases.next_for(agents, self._orders)) is None:
                    if self._over:
                        return None
                    await self._polls.wait(agents)
                return task_id
        except TimeoutError:
            return None

    async def _begin(self, order: TaskOrder, task: LeasedTask, lease_id: str) -> TaskLease | None:
        """Opens the session of a lease and records both; None if the lease ends meanwhile."""
        opening = {**order.opening, "metadata": {**order.opening.get("metadata", {}), TASK: order.task_id}}
        opened = await self.sessions.open(opening)
        if not task.has(lease_id):  # nobody who ended it knew of this session
            await self.sessions.drop(opened["session_id"], *UNWANTED)
            return None
        self.lease_sessions.add(lease_id, order.task_id, opened["session_id"])
        lease = LiveLease(lease_id, task.task_id, opened["session_id"], task.runner, task.attempts, task.terms)
        await self.record(*lease.events())
        if not task.has(lease_id):
            return None
        return TaskLease(
            lease_id,
            order.task_id,
            order.terms.agent,
            task.attempts,
            order.task,
            opened["session_id"],
            opened["key"],
            order.time_limit_s,
            order.terms.lease_s,
        )

    def extend(self, lease_id: str) -> tuple[float, float]:
        """Its runner lives: the seconds of its lease from now on, and those that its session's calls have waited."""
        task = self.leases.extend(lease_id, self._now())
        return task.terms.lease_s, self.sessions.calls.paused_time.seconds(self.lease_sessions.of(lease_id))

    @whole
    async def complete(self, lease_id: str, outcome: dict[str, Any]) -> bool:
        """Its agent has ended so. False if the task was withdrawn."""
        task, session_id = self.leases.complete(lease_id, self._now()), self.lease_sessions.of(lease_id)
        await self.record(done(lease_id, task.task_id, outcome))
        if current := self._is_current(task):
            self._resolve(task, TaskResult(DONE, task.attempts, session_id, outcome))
        return current

    @whole
    async def take_back(self, lease_id: str, reason: str, *, refused: bool) -> None:
        """Its runner gives it back, or refuses the task."""
        end = self.leases.refuse if refused else self.leases.give_back
        await self._attempts_ended([end(lease_id, self._now())], reason)

    # Ends of leases

    async def _attempts_ended(self, ends: Sequence[EndedLease], reason: str = "") -> None:
        """Records ends of leases without a result, drops their sessions, and offers their tasks again or fails them.

        As soon as this first waits, a runner may lease one of the tasks again, so the replies of the one before are
        offered first.
        """
        tasks = [self.leases[ended.task_id] for ended in ends]
        events = []
        for ended in ends:
            if ended.kind == "lost" or not self.lease_sessions.called(ended.lease_id):
                self.lease_sessions.lose(ended.lease_id)
            values = (ended.task_id, ended.runner, ended.kind, ended.state, reason)
            logger.warning("the task %s of runner %s: %s, now %s. %s", *values)
            detail = {"task": ended.task_id, "runner": ended.runner, "state": str(ended.state), "reason": reason}
            events.append(event(ended.kind, ended.lease_id or ended.task_id, detail))
        await self.record(*events)
        for task in tasks:
            self._offer(task)
        for ended, task in zip(ends, tasks, strict=True):
            await self.lease_sessions.drop(ended.lease_id)
            if self._is_current(task) and task.state is ended.state:
                self._apply_end(task, reason)

    def _apply_end(self, task: LeasedTask, reason: str) -> None:
        """Fails a task that is not tried again, and drops one that nobody asks for."""
        if task.state is LOST:
            last = f"; the last one refused it: {reason}" if reason else ""
            error = f"{task.attempts} runners one after another were lost with it, or refused it{last}"
            self._resolve(task, TaskResult(LOST, task.attempts, error=error))
        elif task.state is UNCLAIMED:
            agent, claim_s = task.terms.agent, task.terms.claim_s
            way_out = f"Start one with --agent {agent}=module:run"
            error = f"no runner that offers the agent {agent!r} took it for {claim_s:g} s. {way_out}"
            self._resolve(task, TaskResult(UNCLAIMED, task.attempts, error=error))
        elif task.task_id not in self._orders:  # of an earlier process, and no agent loop asked for it since
            self.leases.withdraw(task.task_id)
            self._forget(task)

    def _is_current(self, task: LeasedTask) -> bool:
        """Whether it is still in the book; it is not if it was withdrawn meanwhile."""
        return task.task_id in self.leases and self.leases[task.task_id] is task

    @whole
    async def _give_back(self, lease_id: str, beginning: asyncio.Future[Any] | None = None) -> None:
        """Ends a lease that never reached its runner, when it has begun."""
        if beginning is not None:
            await asyncio.wait({beginning})  # what is in the journal cannot be taken back, only ended
        try:
            ended = self.leases.give_back(lease_id, self._now())
        except LeaseError:  # it was withdrawn, or expired, meanwhile: that ended its session
            await self.lease_sessions.drop(lease_id)
        else:
            await self._attempts_ended([ended])

    @whole
    async def _withdraw(self, task_id: str) -> None:
        """Nobody wants the task any more."""
        if task_id not in self.leases:
            return
        task, was = self.leases[task_id], self.leases[task_id].state
        if self.leases.withdraw(task_id) or was is DONE:
            lease_id = task.lease_id if was in (LEASED, DONE) else ""
            await self.record(event("withdrawn", lease_id or task_id, {"task": task_id, "runner": task.runner}))
        await self.lease_sessions.drop(task.lease_id, UNWANTED)
        if self._is_current(task):
            self._forget(task)

    def _resolve(self, task: LeasedTask, result: TaskResult) -> None:
        """Gives the result to whoever asks for it; one without a session is not asked for again."""
        future = self._results.setdefault(task.task_id, asyncio.get_running_loop().create_future())
        if not future.done():
            future.set_result(result)
        if result.state is not DONE:
            self._forget(task)

    def _forget(self, task: LeasedTask) -> None:
        assert task.state in TERMINAL, task
        self.leases.forget(task.task_id)
        self.lease_sessions.take(task.lease_id)
        self._orders.pop(task.task_id, None)
        self._results.pop(task.task_id, None)

    def _offer(self, task: LeasedTask) -> None:
        """A runner that waits may take the task, if it is queued."""
        if task.state is QUEUED:
            self._polls.offer(task.terms.agent)
        self._wake_expiry()

    def _wake_expiry(self) -> None:
        deadline = self.leases.next_deadline()
        if deadline is not None and (self._until is None or deadline < self._until):
            self.sooner.set()

    async def _expire(self) -> None:
        """Ends leases, and the time that a task may wait for a runner, at their deadlines."""
        while True:
            if expired := self.leases.expire(self._now()):
                await self._attempts_ended(expired)
            self.sooner.clear()
            self._until = self.leases.next_deadline()
            try:
                async with asyncio.timeout(None if self._until is None else max(0.0, self._until - self._now())):
                    await self.sooner.wait()
            except TimeoutError:
                pass  # it is the time of a deadline

    # The journal

    async def record(self, *events: OutsideEvent) -> None:
        """Events take their places in the journal's order before this first waits."""
        try:
            await self.sessions.journal.append(*events)
        except JournalError as error:
            self._on_failure(error)
            raise
