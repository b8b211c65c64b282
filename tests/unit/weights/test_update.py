"""An update of the weights: the order of its parts, who waits for what and how long, and where an error is raised."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.errors import ReplicaLostError, WeightsNotLoadedError
from seamless_verl.weights import update as module
from seamless_verl.weights.update import CommitTimes, Reach, WeightUpdate

LIMIT_S = 30
COMMITTED_S = 10.0


class Gate:
    """Loads that go on one at a time, when they are let."""

    def __init__(self) -> None:
        self.begun, self.loaded = list[tuple[str, ...]](), list[str]()
        self.go, self.changed = threading.Semaphore(0), threading.Condition()
        self.failing: set[str] = set()

    def load(self, ids: Sequence[str]) -> None:
        with self.changed:
            self.begun.append(tuple(ids))
            self.changed.notify_all()
        assert self.go.acquire(timeout=LIMIT_S)
        if self.failing & set(ids):
            raise ConnectionError("the host is gone")
        self.loaded += ids

    def wait_begun(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) == count, LIMIT_S)


def test_the_caller_goes_on_and_waits_only_for_the_replicas_that_it_names() -> None:
    gate = Gate()
    update = WeightUpdate(1, [["a"], ["b", "c"]], gate.load)
    gate.wait_begun(1)
    assert update.open and gate.loaded == []
    update.wait(ids=[])
    gate.go.release()
    update.wait(ids=["a"])
    gate.wait_begun(2)
    assert gate.loaded == ["a"] and update.open
    gate.go.release()
    update.wait()
    assert gate.loaded == ["a", "b", "c"] and gate.begun == [("a",), ("b", "c")] and not update.open


def test_an_error_is_raised_with_the_replicas_names_at_every_later_wait() -> None:
    gate = Gate()
    gate.failing = {"b"}
    update = WeightUpdate(7, [["a"], ["b", "c"], ["d"]], gate.load)
    gate.go.release()
    gate.go.release()
    for ids in (None, ["d"], ["a"], []):
        with pytest.raises(
            WeightsNotLoadedError, match="replica b, c could not load version 7: ConnectionError: the host"
        ):
            update.wait(ids=ids)
    assert gate.begun == [("a",), ("b", "c")], "no round begins after an error"


def test_an_error_is_known_without_waiting_while_nothing_waits_for_the_loads() -> None:
    gate = Gate()
    gate.failing = {"b"}
    update = WeightUpdate(7, [["a"], ["b"], ["c"]], gate.load)
    gate.wait_begun(1)
    update.raise_failed()  # returns while the first round is open
    gate.go.release()
    gate.wait_begun(2)
    update.raise_failed()
    gate.go.release()
    with pytest.raises(WeightsNotLoadedError):
        update.wait()
    with pytest.raises(WeightsNotLoadedError, match="replica b could not load version 7"):
        update.raise_failed()


def test_who_waited_before_the_error_learns_of_it_too() -> None:
    gate = Gate()
    gate.failing = {"a"}
    update, errors = WeightUpdate(1, [["a"], ["b"]], gate.load), list[BaseException]()

    def wait() -> None:
        try:
            update.wait(ids=["b"])
        except WeightsNotLoadedError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    gate.go.release()
    waiting.join(LIMIT_S)
    assert [str(error) for error in errors] == ["replica a could not load version 1: ConnectionError: the host is gone"]


def test_a_fleet_that_cannot_go_on_is_known_after_the_last_load() -> None:
    gate = Gate()

    def check() -> None:
        assert gate.loaded == ["a"]
        raise ReplicaLostError("a", "no replica serves version 1")

    update = WeightUpdate(1, [["a"]], gate.load, check)
    gate.go.release()
    with pytest.raises(ReplicaLostError, match="no replica serves version 1"):
        update.wait()
    with pytest.raises(ReplicaLostError):
        update.wait(ids=["a"])


class Commit(Gate):
    """Also a commit before the update, which ends when it is let."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.committing = error, threading.Semaphore(0)

    def commit(self) -> None:
        assert self.committing.acquire(timeout=LIMIT_S)
        if self.error is not None:
            raise self.error


def test_the_version_is_committed_then_prompts_begin_then_replicas_load() -> None:
    gate, order = Commit(), list[str]()
    update = WeightUpdate(1, [["a"]], gate.load, commit=gate.commit)

    def first() -> None:
        assert not gate.begun
        order.append("first")
        update.then(lambda: order.append("within"))

    update.then(first)
    update.then(lambda: order.append("second"))
    update.wait(ids=[])
    assert not update.committed.done() and order == []
    gate.committing.release()
    update.wait(Reach.COMMITTED)
    assert order == ["first", "second", "within"]
    update.then(lambda: order.append("at once"))
    assert order[-1] == "at once"
    gate.go.release()
    update.wait()
    assert gate.loaded == ["a"] and not update.open


def test_who_needs_a_replica_waits_for_the_commit_too() -> None:
    gate = Commit()
    update = WeightUpdate(1, [["a"]], gate.load, commit=gate.commit)
    waiting = threading.Thread(target=update.wait, args=(Reach.LOADED, ["a"]))
    waiting.start()
    gate.go.release()
    waiting.join(0.05)
    assert waiting.is_alive() and not gate.begun
    gate.committing.release()
    waiting.join(LIMIT_S)
    assert not waiting.is_alive() and gate.loaded == ["a"]


def test_a_commit_that_fails_is_raised_wherever_it_is_needed_and_nothing_begins() -> None:
    gate, begun = Commit(OSError("no space left")), list[str]()
    update = WeightUpdate(1, [["a"], ["b"]], gate.load, commit=gate.commit)
    update.then(lambda: begun.append("prompts"))
    update.raise_failed()  # not yet
    gate.committing.release()
    for attempt in (
        lambda: update.wait(Reach.COMMITTED),
        update.wait,
        update.raise_failed,
        lambda: update.wait(ids=["b"]),
        lambda: update.wait(ids=[]),
        lambda: update.then(lambda: begun.append("later prompts")),
    ):
        with pytest.raises(OSError, match="no space left"):
            attempt()
    assert gate.begun == [] and begun == []


def test_prompts_that_cannot_begin_end_the_commit() -> None:
    gate = Commit()
    update = WeightUpdate(1, [["a"]], gate.load, commit=gate.commit)

    def begin() -> None:
        raise ConnectionError("the agent loop worker is dead")

    update.then(begin)
    gate.committing.release()
    with pytest.raises(ConnectionError, match="agent loop worker"):
        update.wait()
    assert gate.begun == []


class Clock:
    """`time`, as far as it is used."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@given(st.lists(st.integers(-5, 25), min_size=2, max_size=12, unique=True).map(sorted))
def test_waits_are_divided_at_the_commit_and_none_counts_twice(times: Sequence[int]) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", clock)
        counted, before, behind = CommitTimes(began=0.0), 0.0, 0.0
        for since, until in zip(times[::2], times[1::2], strict=False):
            clock.now = float(until)
            counted.committed = COMMITTED_S if until >= COMMITTED_S else None
            counted.trainer_waited(float(since), for_loads=True)
            before += sum(0 <= second < COMMITTED_S for second in range(since, until))
            behind += sum(second >= COMMITTED_S for second in range(since, until))
    assert (counted.before_commit_s, counted.loads_waited_s) == (before, behind)


def test_a_wait_for_groups_counts_until_the_commit_alone() -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "time", clock)
        counted = CommitTimes(began=0.0, committed=COMMITTED_S)
        clock.now = 25.0
        counted.trainer_waited(4.0, for_loads=False)
    assert (counted.before_commit_s, counted.loads_waited_s) == (6.0, 0.0)


def test_the_share_of_the_trainer_has_its_own_waits_and_those_of_its_workers() -> None:
    counted = CommitTimes(began=0.0, committed=8.0, load_s=12.0, pauses_s=[2.0, 4.0])
    counted.before_commit_s, counted.held_s = 1.0, 3.0
    metrics = counted.metrics()
    assert counted.total_s == 20.0 and metrics["trainer_s"] == 4.0
    assert metrics["trainer_share"] == 0.2 and metrics["standstill_share"] == 0.15
