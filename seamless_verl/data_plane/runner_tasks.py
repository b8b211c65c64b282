"""Tasks for runners: processes outside of the run that lease tasks and run agents on them (`runner_requests.py`).

Owned state: the lease book, the task and the result of each of its tasks, and the session of each lease
(`LeaseSessions`). A session is opened when its task is leased. It ends with its lease: a completed one is left to the
agent loop, any other is closed and dropped, and its task is queued again.

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
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from seamless_verl.data_plane.earlier_leases import EarlierLeases, OpenSession
from seamless_verl.data_plane.earlier_sessions import BegunAgain
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
)
from seamless_verl.data_plane.lease_events import LiveLease, again, event, leased
from seamless_verl.data_plane.lease_expiry import LeaseExpiry
from seamless_verl.data_plane.lease_sessions import NO_RUNNER, UNWANTED, LeaseSessions
from seamless_verl.data_plane.sessions import Sessions
from seamless_verl.data_plane.task_polls import TaskPolls
from seamless_verl.data_plane.tasks import GivenTask, TaskOrder, TaskResult
from seamless_verl.errors import JournalError, LeaseError
from seamless_verl.journal import BEGUN, OutsideEvent
from seamless_verl.runtime.whole_work import WholeWork

logger = logging.getLogger(__name__)
TASK = "runner_task"  # in a session's metadata


class RunnerTasks:
    """The tasks of one data plane; `now` is a clock in seconds, by default that of `LeaseExpiry`, and `on_failure` gets
    the error that ends their expiry."""

    def __init__(
        self,
        sessions: Sessions,
        *,
        now: Callable[[], float] | None = None,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.sessions, self.leases, self._on_failure = sessions, LeaseBook(), on_failure
        self.expiry = LeaseExpiry(self.leases, self._expired, now=now, on_failure=on_failure)
        self._now = self.expiry.now
        self._orders: dict[str, TaskOrder] = {}
        self._results: dict[str, asyncio.Future[TaskResult]] = {}
        self.lease_sessions = LeaseSessions(sessions)
        self._earlier, self.carried_on = EarlierLeases(), 0
        self._polls, self._started = TaskPolls(), asyncio.Event()
        self._work, self._over = WholeWork(), False

    async def start(self, *, restarted: bool) -> None:
        """Continues with the leases of an earlier process, also of an earlier start of the run, until `begin_run`."""
        restored = await self._restore()
        if not restarted:
            await self.record(event(BEGUN, "", {}), *again(restored))
        self._started.set()
        self.expiry.start()

    async def stop(self) -> None:
        """Ends the expiry; leases that runners still hold are of no use to them."""
        await self.expiry.stop()
        await self._work.ended()

    def end_polls(self) -> None:
        """Runners that wait for a task get none, and ask again in vain: the run is over."""
        self._over = True
        self._polls.wake_all()

    async def begin_run(self, run: str, version: int) -> None:
        """The run goes on from these weights: ends the leases of earlier starts that it cannot go on with."""
        for task_id, session, why in self._earlier.refuse(run, version):
            if session.run == run:
                self.sessions.earlier.count(why, session.tokens)
                if task_id in self.leases:  # it may have expired
                    self.lease_sessions.lose(self.leases[task_id].lease_id, version)
            await self._withdraw(task_id)

    # The agent loops' side

    async def run(self, order: TaskOrder) -> TaskResult:
        """Has the task done by a runner; returns how it ended. Cancelled, the task is withdrawn.

        Repeated for a task that is in the book, it waits for the same result.
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
        found = None if order.task_id in self.leases else self._earlier.take(order.opening)
        if found is None or found[0] not in self.leases:
            return order
        task_id, session, too_old = found
        if too_old:
            self.sessions.earlier.count(BegunAgain.OLDER_WEIGHTS, session.tokens)
            await self._withdraw(task_id)
            return order
        self.carried_on += 1
        return replace(order, task_id=task_id)

    async def release(self, uids: Collection[str], unwanted: Collection[str], handing: Collection[str]) -> None:
        """The agent loops of these prompts are gone: leases go on for the next that asks, other tasks are withdrawn.

        So are all tasks of the `unwanted` among them. Sessions whose results are `handing` over stay as they are.
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
                self._earlier.add(task_id, OpenSession.of(stored))

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

    # The runners' side

    async def started(self) -> None:
        """Returns when the leases of an earlier process are known."""
        await self._started.wait()

    async def end_given(self, lease_id: str) -> bool:
        """Ends a lease that a runner asks for again, as it did not get the first reply; False if it was not given."""
        known = self.leases.knows(lease_id)
        if known:
            await self._work.do(self._give_back(lease_id))
        return known

    async def lease(self, lease_id: str, runner: str, agents: frozenset[str], wait_s: float) -> GivenTask | None:
        """Gives a task of these agents to a runner, and opens its session; None if there is none for so long.

        Raises:
            ApiError: too many sessions are open; nothing was given.
        """
        task_id = await self._next_task(agents, wait_s)
        if task_id is None:
            return None
        self.leases.lease(task_id, lease_id, runner, self._now())
        self.expiry.wake()
        beginning = asyncio.ensure_future(self._begin(self._orders[task_id], self.leases[task_id], lease_id))
        try:
            return await asyncio.shield(beginning)
        except BaseException:  # the runner left, or the session cannot be opened: nobody works on the task
            await self._work.do(self._give_back_begun(lease_id, beginning))
            raise

    async def _give_back_begun(self, lease_id: str, beginning: asyncio.Future[Any]) -> None:
        await asyncio.wait({beginning})  # what is in the journal cannot be taken back, only ended
        await self._give_back(lease_id)

    async def _next_task(self, agents: frozenset[str], wait_s: float) -> str | None:
        try:
            async with asyncio.timeout(wait_s):
                # One without an order is of an earlier process: its agent loop has not asked for it yet.
                while (task_id := self.leases.next_for(agents, self._orders)) is None:
                    if self._over:
                        return None
                    await self._polls.wait(agents)
                self.sessions.gateway.table.check_room()
                return task_id
        except TimeoutError:
            return None

    async def _begin(self, order: TaskOrder, task: LeasedTask, lease_id: str) -> GivenTask | None:
        """Opens the session of a lease and records both; None if the lease ends meanwhile."""
        opening = {**order.opening, "metadata": {**order.opening.get("metadata", {}), TASK: order.task_id}}
        opened = await self.sessions.open(opening)
        if not task.has(lease_id):  # nobody who ended it knew of this session
            await self.sessions.drop(opened["session_id"], *UNWANTED)
            return None
        self.lease_sessions.add(lease_id, order.task_id, opened["session_id"])
        await self.record(leased(lease_id, task, opened["session_id"]))
        return GivenTask(order, task.attempts, opened["session_id"], opened["key"]) if task.has(lease_id) else None

    def extend(self, lease_id: str) -> tuple[float, float]:
        """Its runner lives: the seconds of its lease from now on, and those for which its session's calls have waited.

        Raises:
            LeaseError: it has ended.
        """
        task = self.leases.extend(lease_id, self._now())
        return task.terms.lease_s, self.sessions.calls.paused_time.seconds(self.lease_sessions.of(lease_id))

    async def complete(self, lease_id: str, outcome: dict[str, Any]) -> bool:
        """Its agent has ended so; all of it is done if the caller is cancelled. False if the task was withdrawn.

        Raises:
            LeaseError: it has ended.
        """
        return await self._work.do(self._complete(lease_id, outcome))

    async def _complete(self, lease_id: str, outcome: dict[str, Any]) -> bool:
        task, session_id = self.leases.complete(lease_id, self._now()), self.lease_sessions.of(lease_id)
        await self.record(event("done", lease_id, {"task": task.task_id, "outcome": outcome}))
        if current := self._is_current(task):
            self._resolve(task, TaskResult(DONE, task.attempts, session_id, outcome))
        return current

    async def take_back(self, lease_id: str, reason: str, *, refused: bool) -> None:
        """Its runner gives it back, or refuses the task; all of it is done if the caller is cancelled.

        Raises:
            LeaseError: it has ended.
        """
        await self._work.do(self._take_back(lease_id, reason, refused))

    async def _take_back(self, lease_id: str, reason: str, refused: bool) -> None:
        task = (self.leases.refuse if refused else self.leases.give_back)(lease_id, self._now())
        ended = EndedLease(task.task_id, lease_id, task.runner, task.state)
        await self._attempts_ended([("task refused" if refused else "given back", ended)], reason)

    # Ends of leases

    async def _expired(self, ends: Sequence[EndedLease]) -> None:
        await self._attempts_ended([("lost" if ended.lease_id else "unclaimed", ended) for ended in ends])

    async def _attempts_ended(self, ends: Sequence[tuple[str, EndedLease]], reason: str = "") -> None:
        """Records ends of leases without a result, each with its kind, drops their sessions, and offers their tasks
        again or fails them.

        As soon as this first waits, a runner may lease one of the tasks again. It gets the replies of the one before,
        which are therefore offered first.
        """
        tasks = [self.leases[ended.task_id] for _, ended in ends]
        events = []
        for kind, ended in ends:
            if kind == "lost" or not self.lease_sessions.called(ended.lease_id):
                self.lease_sessions.lose(ended.lease_id)
            logger.warning(
                "the task %s of runner %s: %s, now %s. %s", ended.task_id, ended.runner, kind, ended.state, reason
            )
            detail = {"task": ended.task_id, "runner": ended.runner, "state": str(ended.state), "reason": reason}
            events.append(event(kind, ended.lease_id or ended.task_id, detail))
        await self.record(*events)
        for task in tasks:
            self._offer(task)
        for (_, ended), task in zip(ends, tasks, strict=True):
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
            self.leases.withdraw(task.task_id, self._now())
            self._forget(task)

    def _is_current(self, task: LeasedTask) -> bool:
        """Whether it is still in the book; it is not if it was withdrawn meanwhile."""
        return task.task_id in self.leases and self.leases[task.task_id] is task

    async def _give_back(self, lease_id: str) -> None:
        """Ends a lease that never reached its runner."""
        try:
            task = self.leases.give_back(lease_id, self._now())
        except LeaseError:  # it was withdrawn, or expired, meanwhile: that ended its session
            await self.lease_sessions.drop(lease_id)
            return
        await self._attempts_ended([("given back", EndedLease(task.task_id, lease_id, task.runner, task.state))])

    async def _withdraw(self, task_id: str) -> None:
        """Nobody wants the task any more; all of it is done if the caller is cancelled."""
        await self._work.do(self._withdraw_whole(task_id))

    async def _withdraw_whole(self, task_id: str) -> None:
        if task_id not in self.leases:
            return
        task, was = self.leases[task_id], self.leases[task_id].state
        ended = self.leases.withdraw(task_id, self._now())
        if ended is not None or was is DONE:
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
        self.expiry.wake()

    # The journal

    async def record(self, *events: OutsideEvent) -> None:
        """Events take their places in the journal's order before this first waits."""
        try:
            await self.sessions.journal.append(*events)
        except JournalError as error:
            self._on_failure(error)
            raise

    async def _restore(self) -> list[LiveLease]:
        """Restores the leases and results of earlier processes, and ends sessions that belong to no lease."""
        restored = [live for live in self.sessions.live_leases if live.session_id in self.sessions.closed]
        for live in restored:
            self._restore_lease(live)
        for session_id in [name for name in self.sessions.closed if name not in self.lease_sessions]:
            if TASK in self.sessions.gateway.table.get(session_id).metadata:
                await self.sessions.drop(session_id, *NO_RUNNER)
        return restored

    def _restore_lease(self, live: LiveLease) -> None:
        self.leases.restore(live.task_id, live.terms, live.lease_id, live.runner, live.attempt, self._now())
        self.lease_sessions.add(live.lease_id, live.task_id, live.session_id)
        if (session := self.sessions.leased.get(live.session_id)) is not None:
            self._earlier.add(live.task_id, session)
        if live.outcome is not None:
            task = self.leases.complete(live.lease_id, self._now())
            self._resolve(task, TaskResult(DONE, task.attempts, live.session_id, live.outcome))
