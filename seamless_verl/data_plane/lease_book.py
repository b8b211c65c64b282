"""The lease book: which task which runner works on, as a pure state machine that is given the time.

Agent loops submit tasks; runners, outside of the run, lease them, extend their leases, and complete them. The data
plane applies the consequences: it opens and closes sessions.

Invariants:
- A task is in one state, and changes it only as in `LEGAL`. A terminal state is final.
- A task that is LEASED has one lease, and no other task has any. A lease's id is used once.
- A task is DONE by one lease, which had not expired then.
- Tasks submitted = queued + leased + ended, in each state, until a task is forgotten.
- Of the tasks that one runner may take, those with `first` are leased before the others, and of either those that were
  submitted first, also after a lost lease.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import Any

from seamless_verl.errors import LeaseError
from seamless_verl.rollout.slots import check_equal

REMEMBERED = 65_536  # leases that have ended, whose late requests get the reason


class TaskState(StrEnum):
    """Where a task is."""

    QUEUED = "queued"
    """it waits for a runner"""
    LEASED = "leased"
    """a runner works on it"""
    DONE = "done"
    """a runner gave its result"""
    LOST = "lost"
    """its runners were lost, or refused it, as often as it may be tried"""
    UNCLAIMED = "unclaimed"
    """no runner took it in time"""
    WITHDRAWN = "withdrawn"
    """whoever submitted it no longer wants it"""


QUEUED, LEASED, DONE, LOST, UNCLAIMED, WITHDRAWN = TaskState

LEGAL = {  # from, to
    *((QUEUED, LEASED), (QUEUED, UNCLAIMED), (QUEUED, WITHDRAWN)),
    *((LEASED, DONE), (LEASED, QUEUED), (LEASED, LOST), (LEASED, WITHDRAWN)),
}
FIRST = 1 << 40  # places, more than a book ever has
TERMINAL = frozenset({DONE, LOST, UNCLAIMED, WITHDRAWN})


@dataclass(frozen=True)
class LeaseTerms:
    """How a task may be leased, in seconds: `lease_s` without a sign of life end a lease, `claim_s` in the queue the
    task (None: it waits for ever). It is tried at most `max_attempts` times. `agent` is what a runner must offer. What
    goes `first`, as a validation, is taken before all that does not."""

    agent: str
    lease_s: float
    claim_s: float | None
    max_attempts: int
    first: bool = False


@dataclass
class LeasedTask:
    """A task in the book. `place` is its place in the queue, `deadline` when it leaves its state at the latest;
    `lease_id` and `runner` are those of its last lease."""

    task_id: str
    terms: LeaseTerms
    place: int
    state: TaskState
    deadline: float | None = None
    attempts: int = 0
    lease_id: str = ""
    runner: str = ""

    def has(self, lease_id: str) -> bool:
        """Whether a runner works on it under this lease."""
        return self.state is LEASED and self.lease_id == lease_id


@dataclass(frozen=True)
class EndedLease:
    """What became of a task by the end of a lease, or of its time in the queue; then `lease_id` is empty."""

    kind: str  # of the event in the journal
    task_id: str
    lease_id: str
    runner: str
    state: TaskState


@dataclass(frozen=True)
class TaskOrder:
    """A task as its agent loop submits it: what the agent gets, and what its session is opened with."""

    task_id: str
    task: dict[str, Any]
    opening: dict[str, Any]
    time_limit_s: float
    terms: LeaseTerms


@dataclass(frozen=True)
class TaskResult:
    """How a task ended. It has a session, which is still open, and an outcome if its `state` is DONE."""

    state: TaskState
    attempts: int
    session_id: str = ""
    outcome: dict[str, Any] = field(default_factory=dict)  # the fields of a TaskCompletion
    error: str = ""


class LeaseBook:
    """All tasks of one data plane.

    No request looks at all of them: an entry of the queues or the deadlines is taken out when it comes first and does
    not hold any more.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, LeasedTask] = {}
        self._by_lease: dict[str, LeasedTask] = {}
        self._queued: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)  # heaps of ranks, by agent
        self._deadlines: list[tuple[float, int, LeasedTask]] = []  # a heap; a deadline that is put off keeps its entry
        self._numbers = count()
        self._ended: OrderedDict[str, str] = OrderedDict()  # reasons, by lease
        self._places = self._submitted = self._forgotten = 0
        self._counts: Counter[TaskState] = Counter()

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._tasks

    def __getitem__(self, task_id: str) -> LeasedTask:
        return self._tasks[task_id]

    def get(self, task_id: str) -> LeasedTask | None:
        return self._tasks.get(task_id)

    def __iter__(self) -> Iterator[LeasedTask]:
        return iter(self._tasks.values())

    def submit(self, task_id: str, terms: LeaseTerms, now: float) -> None:
        """Queues a task; raises ValueError if the book has it already."""
        if task_id in self._tasks:
            raise ValueError(f"task_id={task_id!r} is in the book; give each task its own")
        self._tasks[task_id] = task = LeasedTask(task_id, terms, self._places, QUEUED)
        self._enqueue(task, now)
        self._places, self._submitted = self._places + 1, self._submitted + 1
        self._counts[QUEUED] += 1

    def next_for(self, agents: Collection[str], ready: Container[str] | None = None) -> str | None:
        """The queued task that a runner with these agents is to take, of those that are `ready`, by default of all."""
        found = [entry for agent in agents if (entry := self._first_of(agent, ready)) is not None]
        return min(found)[1] if found else None

    def _first_of(self, agent: str, ready: Container[str] | None) -> tuple[int, str] | None:
        queued = self._queued.get(agent, [])
        while queued and not self._is_queued(queued[0][1]):
            heapq.heappop(queued)
        if not queued or ready is None or queued[0][1] in ready:
            return queued[0] if queued else None
        # rare, and only after a restart
        return min((entry for entry in queued if self._is_queued(entry[1]) and entry[1] in ready), default=None)

    def _is_queued(self, task_id: str) -> bool:
        task = self._tasks.get(task_id)
        return task is not None and task.state is QUEUED

    def knows(self, lease_id: str) -> bool:
        """Whether a lease of this id was given; of those that have ended the last 65,536 are known."""
        return lease_id in self._by_lease or lease_id in self._ended

    def lease(self, task_id: str, lease_id: str, runner: str, now: float) -> None:
        """Gives the queued task to a runner."""
        task = self._tasks[task_id]
        assert not self.knows(lease_id), "a lease's id is used once"
        self._move(task, LEASED)
        task.attempts, task.lease_id, task.runner = task.attempts + 1, lease_id, runner
        self._set_deadline(task, now + task.terms.lease_s)
        self._by_lease[lease_id] = task

    def extend(self, lease_id: str, now: float) -> LeasedTask:
        """A sign of life of the runner: the lease lasts `lease_s` from now on; raises LeaseError if it has ended."""
        task = self._live(lease_id, now)
        task.deadline = now + task.terms.lease_s  # it is only put off
        return task

    def complete(self, lease_id: str, now: float) -> LeasedTask:
        """The task is done, by this lease; raises LeaseError if the lease has ended, also by an earlier completion."""
        task = self._live(lease_id, now)
        self._end_lease(task, "done", "its result was accepted before")
        self._move(task, DONE)
        return task

    def give_back(self, lease_id: str, now: float) -> EndedLease:
        """The runner stops: the task is queued again, and this attempt does not count."""
        task = self._live(lease_id, now)
        self._end_lease(task, "given back", "its runner gave it back")
        self._move(task, QUEUED)
        self._enqueue(task, now)
        task.attempts -= 1
        return EndedLease("given back", task.task_id, lease_id, task.runner, task.state)

    def refuse(self, lease_id: str, now: float) -> EndedLease:
        """The runner cannot do the task: it is queued again if it may be tried again, else LOST."""
        task = self._live(lease_id, now)
        self._end_lease(task, "refused", "its runner refused the task")
        self._retry(task, now)
        return EndedLease("task refused", task.task_id, lease_id, task.runner, task.state)

    def withdraw(self, task_id: str) -> bool:
        """Nobody wants the task any more; False if it has ended before. Its lease ends."""
        task = self._tasks[task_id]
        if task.state in TERMINAL:
            return False
        if task.state is LEASED:
            self._end_lease(task, "withdrawn", "the run no longer wants the task")
        self._move(task, WITHDRAWN)
        return True

    def expire(self, now: float) -> list[EndedLease]:
        """Ends the leases, and the times in the queue, that are over; returns what became of their tasks."""
        ended = []
        while (due := self._first_due()) is not None and due[0] <= now:
            task = due[1]
            if task.state is LEASED:
                self._end_lease(task, "expired", f"no sign of life for {task.terms.lease_s:g} s")
                self._retry(task, now)
                ended.append(EndedLease("lost", task.task_id, task.lease_id, task.runner, task.state))
            else:
                self._move(task, UNCLAIMED)
                ended.append(EndedLease("unclaimed", task.task_id, "", "", task.state))
        return ended

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next; None: not before another operation."""
        due = self._first_due()
        return None if due is None else due[0]

    def _first_due(self) -> tuple[float, LeasedTask] | None:
        while self._deadlines:
            at, number, task = self._deadlines[0]
            if task.deadline == at:
                return at, task
            if task.deadline is None or task.deadline < at:
                heapq.heappop(self._deadlines)
            else:
                heapq.heapreplace(self._deadlines, (task.deadline, number, task))
        return None

    def restore(self, task_id: str, terms: LeaseTerms, lease_id: str, runner: str, attempts: int, now: float) -> None:
        """A task that was leased when an earlier process of the data plane ended; its lease lasts from now on."""
        self.submit(task_id, terms, now)
        self.lease(task_id, lease_id, runner, now)
        self._tasks[task_id].attempts = attempts

    def forget(self, task_id: str) -> None:
        """Drops a task that has ended; late requests of its leases still get their reason."""
        task = self._tasks[task_id]
        assert task.state in TERMINAL, f"{task_id} is {task.state}"
        del self._tasks[task_id]
        self._counts[task.state] -= 1
        self._forgotten += 1

    def metrics(self) -> dict[str, float]:
        return {f"runner_tasks/{state}": float(self._counts[state]) for state in TaskState}

    def check_integrity(self) -> None:
        """Raises IntegrityError where an invariant does not hold."""
        check_equal("tasks submitted", self._submitted, self._counts.total() + self._forgotten)
        for state in TaskState:
            check_equal(f"tasks {state}", self._counts[state], sum(task.state is state for task in self))
        leased = {task.lease_id: task for task in self if task.state is LEASED}
        check_equal("leases of leased tasks", len(self._by_lease), self._counts[LEASED])
        check_equal("leases by id", len(leased), sum(self._by_lease.get(name) is task for name, task in leased.items()))
        timed = sum(task.deadline is not None for task in self if task.state in TERMINAL)
        check_equal("ended tasks with a deadline", 0, timed)

    def _live(self, lease_id: str, now: float) -> LeasedTask:
        task = self._by_lease.get(lease_id)
        if task is not None and task.deadline is not None and now < task.deadline:
            return task
        if task is not None:
            raise LeaseError(lease_id, "expired", f"no sign of life for {task.terms.lease_s:g} s")
        how, _, reason = self._ended.get(lease_id, "unknown: no such lease was given").partition(": ")
        raise LeaseError(lease_id, how, reason)

    def _end_lease(self, task: LeasedTask, how: str, reason: str) -> None:
        del self._by_lease[task.lease_id]
        self._ended[task.lease_id] = f"{how}: {reason}"
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _retry(self, task: LeasedTask, now: float) -> None:
        if task.attempts >= task.terms.max_attempts:
            self._move(task, LOST)
        else:
            self._move(task, QUEUED)
            self._enqueue(task, now)

    def _enqueue(self, task: LeasedTask, now: float) -> None:
        rank = task.place - (FIRST if task.terms.first else 0)
        heapq.heappush(self._queued[task.terms.agent], (rank, task.task_id))
        if task.terms.claim_s is not None:
            self._set_deadline(task, now + task.terms.claim_s)

    def _move(self, task: LeasedTask, state: TaskState) -> None:
        assert (task.state, state) in LEGAL, f"{task.task_id}: {task.state} to {state}"
        self._counts[task.state] -= 1
        self._counts[state] += 1
        task.state, task.deadline = state, None

    def _set_deadline(self, task: LeasedTask, deadline: float) -> None:
        task.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, next(self._numbers), task))
