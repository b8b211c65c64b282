"""The lease book as a state machine, against a model that keeps every task's history."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from seamless_verl.data_plane.lease_book import DONE, LEASED, QUEUED, TERMINAL, LeaseBook, LeaseTerms, TaskState
from seamless_verl.errors import LeaseError

AGENTS = ("a", "b")
PICK = st.integers(0, 1000)


class Runners(RuleBasedStateMachine):
    """Runners that lease, live, die, come late and give back, while tasks are submitted, withdrawn and forgotten.

    The model: the tasks that were submitted, what each lease came to, and which results were accepted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book, self.now, self.count = LeaseBook(), 0.0, 0
        self.terms: dict[str, LeaseTerms] = {}
        self.leases: dict[str, tuple[str, float]] = {}  # task and deadline of each lease that the model holds for live
        self.over: set[str] = set()  # leases that have ended
        self.accepted: dict[str, str] = {}
        self.tries: dict[str, int] = {}

    def new_name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def some_lease(self, pick: int) -> str | None:
        names = sorted({*self.leases, *self.over})
        return names[pick % len(names)] if names else None

    def live(self, lease: str) -> bool:
        return lease in self.leases and self.now < self.leases[lease][1]

    def end(self, lease: str) -> str:
        self.over.add(lease)
        return self.leases.pop(lease)[0]

    @rule(
        agent=st.sampled_from(AGENTS),
        claim=st.sampled_from([None, 3.0]),
        attempts=st.integers(1, 3),
        first=st.booleans(),
    )
    def submit(self, agent: str, claim: float | None, attempts: int, first: bool) -> None:
        task = self.new_name("task")
        self.terms[task] = LeaseTerms(agent, 2.0, claim, attempts, first)
        self.book.submit(task, self.terms[task], self.now)
        self.tries[task] = 0
        with pytest.raises(ValueError, match="is in the book"):
            self.book.submit(task, self.terms[task], self.now)

    @rule(agents=st.sets(st.sampled_from(AGENTS)))
    def lease(self, agents: set[str]) -> None:
        task = self.book.next_for(agents)
        queued = [t for t in self.terms if t in self.book and self.book[t].state is QUEUED]
        fits = [t for t in queued if self.terms[t].agent in agents]
        fits.sort(key=lambda t: not self.terms[t].first)
        assert task == (fits[0] if fits else None), "the oldest is first, of those that training waits for"
        if task is not None:
            lease = self.new_name("lease")
            self.book.lease(task, lease, "runner", self.now)
            self.leases[lease] = (task, self.now + 2.0)
            self.tries[task] += 1

    @rule(pick=PICK)
    def extend(self, pick: int) -> None:
        if (lease := self.some_lease(pick)) is None:
            return
        if self.live(lease):
            assert self.book.extend(lease, self.now).task_id == self.leases[lease][0]
            self.leases[lease] = (self.leases[lease][0], self.now + 2.0)
        else:
            with pytest.raises(LeaseError):
                self.book.extend(lease, self.now)

    @rule(pick=PICK)
    def complete(self, pick: int) -> None:
        if (lease := self.some_lease(pick)) is None:
            return
        if self.live(lease):
            task = self.end(lease)
            assert self.book.complete(lease, self.now).task_id == task
            assert task not in self.accepted, "done twice"
            self.accepted[task] = lease
        else:
            before = {task.task_id: task.state for task in self.book}
            with pytest.raises(LeaseError):
                self.book.complete(lease, self.now)
            assert before == {task.task_id: task.state for task in self.book}

    @rule(pick=PICK, gives_back=st.booleans())
    def return_task(self, pick: int, gives_back: bool) -> None:
        if (lease := self.some_lease(pick)) is None:
            return
        operation = self.book.give_back if gives_back else self.book.refuse
        if not self.live(lease):
            with pytest.raises(LeaseError):
                operation(lease, self.now)
            return
        task = self.end(lease)
        self.tries[task] -= gives_back
        state = operation(lease, self.now).state
        assert state is (QUEUED if self.tries[task] < self.terms[task].max_attempts else TaskState.LOST)

    @rule(pick=PICK)
    def withdraw(self, pick: int) -> None:
        tasks = [task.task_id for task in self.book]
        if tasks:
            task = tasks[pick % len(tasks)]
            was = self.book[task].state
            assert self.book.withdraw(task) == (was not in TERMINAL)
            for lease in [name for name, (held, _) in self.leases.items() if held == task]:
                self.end(lease)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.5]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        due = {lease for lease, (_, deadline) in self.leases.items() if self.now >= deadline}
        ended = self.book.expire(self.now)
        assert {lost.lease_id for lost in ended if lost.lease_id} == due
        for lost in ended:
            if lost.lease_id:
                task = self.end(lost.lease_id)
                again = self.tries[task] < self.terms[task].max_attempts
                assert lost.state is (QUEUED if again else TaskState.LOST)
            else:
                assert lost.state is TaskState.UNCLAIMED
        assert self.book.expire(self.now) == []
        deadline = self.book.next_deadline()
        assert deadline is None or deadline > self.now

    @rule()
    def forget(self) -> None:
        for task in [task for task in self.book if task.state in TERMINAL]:
            self.book.forget(task.task_id)
            assert task.task_id not in self.book

    @invariant()
    def adds_up(self) -> None:
        self.book.check_integrity()
        leased = {task.lease_id: task.task_id for task in self.book if task.state is LEASED}
        assert leased == {lease: task for lease, (task, _) in self.leases.items()}
        for task in self.book:
            assert (task.state is DONE) == (task.task_id in self.accepted)
            assert task.attempts == self.tries[task.task_id] <= task.terms.max_attempts


Runners.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_runners = Runners.TestCase


def test_a_restored_lease_lasts_from_now_on_and_keeps_its_attempts() -> None:
    book, terms = LeaseBook(), LeaseTerms("a", 2.0, None, 3)
    book.restore("t", terms, "l", "r", 2, now=100.0)
    assert book.extend("l", 101.9).attempts == 2
    (lost,) = book.expire(104.0)
    assert (lost.lease_id, lost.state) == ("l", QUEUED)
    with pytest.raises(LeaseError, match="lease l is expired: no sign of life for 2 s"):
        book.complete("l", 104.0)
    with pytest.raises(LeaseError, match="lease x is unknown"):
        book.extend("x", 104.0)


def test_a_task_that_is_not_ready_is_passed_over_and_keeps_its_place() -> None:
    book, terms = LeaseBook(), LeaseTerms("a", 2.0, None, 3)
    for task in ("t0", "t1", "t2"):
        book.submit(task, terms, 0.0)
    assert book.next_for(["a"], {"t1", "t2"}) == "t1"
    book.lease("t1", "l1", "r", 0.0)
    assert book.next_for(["b", "a"], {"t2"}) == "t2" and book.next_for(["b"]) is None
    assert book.next_for(["a"], {"t0", "t2"}) == "t0" and book.next_for(["a"], ()) is None
