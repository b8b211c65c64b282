"""Commits whose replicas load in the background: random schedules over the real rollout manager and fleet.

The engines are stubs, and the staged memory is a number. A load reads it at its begin and its end. In the background a
thread of the worker stages, which reads the weights at its begin and its end; they change by `update`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.errors import WeightsNotLoadedError
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.manager import FleetSnapshot, RolloutManager
from seamless_verl.rollout.replica import DEAD, PAUSED, RELEASED, SERVING, STALE
from seamless_verl.tools.bench.stub_engine import StubEngine
from seamless_verl.weights.background import BackgroundStaging, StagingBegun, StagingEnd
from seamless_verl.weights.update import Reach

pytestmark = pytest.mark.integration
T = TypeVar("T")
NAMES = ["replica-0", "replica-1", "replica-2", "replica-3"]
SHARED = NAMES[:2]  # on the trainer's devices
WAIT_S = 30
BETWEEN = -1  # the memory while it is written


@dataclass
class Memory:
    """The staged memory, and which replicas load from it."""

    version: int = 0
    loading: set[str] = field(default_factory=set)


class LoadingEngine(StubEngine):
    """Loads in several turns of the loop, or for ever until it is killed."""

    def __init__(self, name: str, memory: Memory) -> None:
        super().__init__(name)
        self.memory, self.turns, self.failing, self.stuck = memory, 3, False, False
        self.loads, self.failed = 0, 0  # how many, and the version that it could not load

    async def update_weights(self, version: int, weights: Any) -> None:
        await super().pause("keep")  # type: ignore[arg-type]
        self.memory.loading.add(self.replica_id)
        try:
            assert weights == [Copied(self.memory.version)] == [Copied(version)], "mapped another version"
            for _ in range(self.turns):
                await asyncio.sleep(0)
            if self.stuck:
                await asyncio.Event().wait()
            if self.failing:
                self.failed = version
                raise WeightsNotLoadedError(self.replica_id, version, "no reason")
            assert self.memory.version == version, "overwritten while it was loaded"
        finally:
            self.memory.loading.discard(self.replica_id)
        self.version, self.loads = version, self.loads + 1
        await self.resume()


class Copied(NamedTuple):
    """Staged weights, without a seal."""

    version: int
    seal: None = None


class Trainers:
    """The trainer's worker: two weights, which are copied to the memory one after the other, `in_background` or not."""

    def __init__(self, memory: Memory, in_background: bool) -> None:
        self.memory, self.in_background = memory, in_background
        self.copying, self.weights, self.turns = BackgroundStaging(), [0, 0], 3
        self.loading: Callable[[], set[str]]
        self.error: Exception | None = None

    def update(self, value: int) -> None:
        """As an optimizer does it."""
        self.copying.wait()
        for i in range(len(self.weights)):
            self.weights[i] = value
            time.sleep(0)

    def stage_weights(self, version: int, seal: str) -> Collection[Any]:
        assert not self.loading(), "staged while a replica loads"
        self.memory.version = BETWEEN
        copy = partial(self.copy, version, list(self.weights))
        if not self.in_background:
            return [copy()]
        self.copying.start(copy)
        return [StagingBegun("here")]

    def copy(self, version: int, committed: list[int]) -> Any:
        copied = list[int]()
        for weight in range(len(self.weights)):
            for _ in range(self.turns):
                time.sleep(0)
            copied.append(self.weights[weight])
        assert copied == committed, f"version {version} is torn: {copied}"
        if self.error is not None:
            raise self.error
        self.memory.version = version
        return Copied(version)

    def finish_staging(self) -> list[StagingEnd]:
        return [self.copying.result()]

    def free_cached_memory(self) -> None:
        pass


class Client:
    """The data plane client: the manager's commands, executed in the loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, manager: RolloutManager) -> None:
        self.loop, self.manager, self.calls = loop, manager, 1

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def execute(self, command: str, *arguments: Any) -> Any:
        return self.do(getattr(self.manager, command)(*arguments))

    def checked_metrics(self, loading: bool = False) -> dict[str, float]:
        async def check() -> dict[str, float]:
            async with self.manager.exclusive():
                self.manager.fleet.check_integrity()
            return {"fleet/attached": float(self.calls)}

        return self.do(check())


class Job:
    """A trainer's thread with its commit, over replicas of two hosts."""

    def __init__(
        self,
        client: Client,
        engines: dict[str, LoadingEngine],
        memory: Memory,
        released: bool,
        in_background: bool = False,
    ) -> None:
        from seamless_verl.weights.commit import WeightCommit

        self.client, self.engines, self.memory, self.released = client, engines, memory, released
        self.version = 0
        self.submitted = 0
        self.begun: list[tuple[int, int]] = []  # for each batch of prompts: the version it needs, and the committed one
        self.trainers = Trainers(memory, in_background)
        self.trainers.loading = lambda: self.memory.loading & set(self.alive)
        trainers: Any = self.trainers
        self.commit = WeightCommit(
            execute=client.execute,
            metrics=client.checked_metrics,
            pauses_s=lambda loaded: [0.0] * len(loaded),
            trainers=trainers,
            sharing={name: (name,) for name in SHARED},
            others=NAMES[2:],
            released=released,
            hosts={name: str(int(name in SHARED)) for name in NAMES},
        )

    @property
    def fleet(self) -> Fleet:
        return self.client.manager.fleet

    @property
    def alive(self) -> list[str]:
        return [view.replica_id for view in self.fleet.view if view.state is not DEAD]

    def commit_next(self) -> None:
        """An optimizer step, and the commit of what it made."""
        self.version += 1
        self.trainers.update(self.version)
        self.commit.begin(self.version)
        if not self.trainers.in_background:
            self.commit.wait(Reach.COMMITTED)
            assert self.fleet.committed == self.version == self.memory.version

    def submit(self) -> None:
        """Prompts of the next step, whose generation must not begin on older weights than those of this version."""
        version = self.version
        self.submitted += 1
        self.commit.then(lambda: self.begun.append((version, self.fleet.committed)))

    def reclaim(self) -> None:
        """As a computation of the trainer does it."""
        self.commit.wait(Reach.LOADED, SHARED)
        assert not self.memory.loading & set(SHARED) & set(self.alive), "the device loads, and training takes it"
        self.client.execute("release_memory" if self.released else "pause", SHARED)

    def lend(self) -> None:
        if not self.released:
            self.client.execute("resume", SHARED)
        elif self.version:
            self.commit.load_again([name for name in SHARED if name in self.alive])

    def kill(self, name: str) -> None:
        async def kill() -> None:
            self.engines[name].kill()
            self.fleet.lost(name, "killed")

        self.client.do(kill())

    def check_loaded(self) -> None:
        """After all loads: whoever lives has the version, or could not load it."""
        self.commit.wait()
        for view in self.fleet.view:
            engine = self.engines[view.replica_id]
            if view.state in (SERVING, PAUSED):
                assert view.version == engine.version == self.version and not view.outdated
            else:
                assert view.state in (DEAD, RELEASED) or (view.state is STALE and engine.failed == self.version)
        assert self.fleet.committed == self.version and all(needed <= found for needed, found in self.begun)
        assert len(self.begun) == self.submitted


async def nothing(*_: Any) -> bool:
    """No other data plane, no lost replica, and nobody who would read the snapshot."""
    return False


@contextmanager
def job(released: bool = False, in_background: bool = False) -> Iterator[Job]:
    from seamless_verl.weights import commit as module

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    fleet, memory = Fleet(), Memory()
    engines = {name: LoadingEngine(name, memory) for name in NAMES}
    for name, engine in engines.items():
        fleet.add(name, engine=engine, control=engine, capacity=4)
    client = Client(loop, RolloutManager(fleet, FleetSnapshot(), save=nothing, reconnect=nothing, forward=nothing))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ray", SimpleNamespace(get=lambda reply: reply))  # replies are results
        patch.setattr(module, "one_per_host", list)
        made = Job(client, engines, memory, released, in_background)
        try:
            yield made
        finally:
            for name in made.alive:
                made.kill(name)
            if made.commit.update is not None:
                made.commit.update.wait()
            loop.call_soon_threadsafe(loop.stop)
            thread.join(WAIT_S)
            loop.close()


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 4))
def test_no_host_loads_more_than_its_share_at_once_and_hosts_do_not_wait_for_each_other(
    sizes: list[int], at_once: int
) -> None:
    from seamless_verl.weights.commit import WeightCommit

    hosts = [[f"{host}-{i}" for i in range(size)] for host, size in enumerate(sizes)]
    nothing: Any = None
    commit = WeightCommit(
        execute=nothing,
        metrics=nothing,
        pauses_s=nothing,
        trainers=nothing,
        sharing={},
        others=[name for host in hosts for name in host],
        at_once=at_once,
        hosts={name: str(number) for number, host in enumerate(hosts) for name in host},
    )
    rounds = commit.rounds()
    assert sorted(name for ids in rounds for name in ids) == sorted(name for host in hosts for name in host)
    assert len(rounds) == -(-max(sizes, default=0) // at_once)
    for host in hosts:
        assert all(len(set(ids) & set(host)) <= at_once for ids in rounds)
        assert [name for ids in rounds for name in ids if name in host] == host


ORDERS = ("commit", "commit", "submit", "reclaim", "lend", "kill", "fail", "mend", "slow", "wait")
STEPS = st.lists(
    st.tuples(
        st.sampled_from(ORDERS),
        st.sampled_from(NAMES[1:]),  # the first one lives, so that one always can serve
    ),
    min_size=3,
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(STEPS, st.booleans(), st.booleans(), st.integers(0, 1))
def test_any_schedule_keeps_the_laws(
    steps: list[tuple[str, str]], released: bool, in_background: bool, calls: int
) -> None:
    """No copy and no load sees two versions, training gets devices on which nothing loads, all who live get each
    version, and no prompt begins before the one that it needs is committed."""
    with job(released, in_background) as made:
        made.client.calls = calls
        for step, name in steps:
            engine = made.engines[name]
            match step:
                case "commit":
                    made.commit_next()
                case "reclaim":
                    made.reclaim()
                case "lend":
                    made.lend()
                case "submit":
                    made.submit()
                case "kill":
                    made.kill(name)
                case "fail" | "mend":
                    made.commit.wait()
                    engine.failing = step == "fail"
                case "slow":
                    engine.turns = made.trainers.turns = 60 - engine.turns
                case "wait" if made.version:
                    made.check_loaded()
        made.commit_next()
        made.check_loaded()


def test_the_trainer_goes_on_while_a_replica_loads_and_the_next_commit_waits() -> None:
    with job() as made:
        made.engines["replica-3"].stuck = True
        made.commit_next()
        made.commit.wait(Reach.LOADED, SHARED)
        assert made.engines["replica-0"].version == 1 and made.commit.update is not None and made.commit.update.open
        next_commit = threading.Thread(target=made.commit_next)
        next_commit.start()
        next_commit.join(0.5)
        assert next_commit.is_alive() and made.memory.version == 1
        made.kill("replica-3")
        next_commit.join(WAIT_S)
        made.check_loaded()
        assert [view.state for view in made.fleet.view] == [SERVING, SERVING, SERVING, DEAD]
        assert made.commit.times.waited_s > 0.1


def test_what_could_not_load_is_counted_and_the_metrics_of_loads_come_with_the_next_commit() -> None:
    with job() as made:
        made.commit.begin(1)
        made.commit.wait()
        made.engines["replica-3"].failing = True
        metrics = made.commit.begin(2)
        assert metrics["seamless/commit/not_loaded"] == 0 and 0 < metrics["seamless/commit/trainer_share"] < 1
        assert made.commit.begin(3)["seamless/commit/not_loaded"] == 1


@pytest.mark.parametrize("calls", [0, 1])
def test_all_replicas_load_together_where_none_has_a_call(calls: int) -> None:
    with job() as made:
        made.client.calls = calls
        made.commit_next()
        made.check_loaded()
        assert made.commit.update is not None
        rounds = [list(ids) for ids, _ in made.commit.update.rounds]
        assert rounds == ([[name] for name in NAMES] if calls else [SHARED, NAMES[2:]])


def test_released_replicas_are_lent_with_the_committed_weights_after_the_open_loads() -> None:
    with job(released=True) as made:
        made.commit_next()
        made.reclaim()
        assert [view.state for view in made.fleet.view][:2] == [RELEASED, RELEASED]
        made.engines["replica-3"].turns = 200
        made.commit_next()
        made.reclaim()
        made.lend()
        made.check_loaded()
        assert [made.engines[name].loads for name in SHARED] == [3, 3]


def test_a_replica_that_was_started_again_and_cannot_load_is_checked_for_at_once() -> None:
    """No commit may come: where none serves, the run would wait for groups for ever."""
    with job() as made:
        checks: list[int] = []
        made.commit.check = lambda: checks.append(made.version)  # type: ignore[method-assign]
        made.commit_next()
        made.commit.wait()
        checks.clear()
        assert made.commit.load_started(["replica-2"]) == ["replica-2"] and not checks
        made.engines["replica-3"].failing = True
        assert made.commit.load_started(["replica-3"]) == [] and checks == [1]


def test_the_trainer_goes_on_while_its_worker_copies_and_its_next_update_is_held_and_counted() -> None:
    with job(in_background=True) as made:
        go, copy = threading.Event(), made.trainers.copy

        def slow_copy(*arguments: Any) -> Any:
            assert go.wait(WAIT_S)
            return copy(*arguments)

        made.trainers.copy = slow_copy  # type: ignore[method-assign]
        made.commit_next()
        made.submit()
        made.commit.wait(ids=[])  # nothing is needed of any replica
        assert made.fleet.committed == 0 and made.begun == []
        update = threading.Thread(target=made.trainers.update, args=(2,))
        update.start()
        update.join(0.5)
        assert update.is_alive() and made.trainers.weights == [1, 1]
        go.set()
        update.join(WAIT_S)
        made.commit.wait()
        assert made.begun == [(1, 1)] and made.trainers.weights == [2, 2]
        times = made.commit.times
        assert 0.2 <= times.held_s <= times.trainer_s and times.stage_s > 0.2


def test_a_copy_that_fails_is_raised_where_the_commit_is_needed_and_nothing_of_it_is_served() -> None:
    with job(in_background=True) as made:
        made.commit_next()
        made.check_loaded()
        made.trainers.error = OSError("no space left")
        made.commit_next()
        for attempt in (made.commit.wait, made.commit.raise_failed, made.commit_next, made.submit):
            with pytest.raises(OSError, match="no space left"):
                attempt()
        assert made.fleet.committed == 1 and made.begun == []
        made.commit.update = None  # the job below waits for its loads


def test_where_a_host_waits_for_the_weights_the_trainer_does_too() -> None:
    with job(in_background=True) as made:
        sent: list[Any] = []

        def stage(version: int, staged: Any) -> tuple[list[int], dict[str, float]]:
            sent.append((version, staged, threading.current_thread()))
            return [], {"bytes": 7.0}

        made.commit.transfer = SimpleNamespace(without=lambda hosts: [3] if hosts == {"here"} else [], stage=stage)  # type: ignore[assignment]
        made.version += 1
        made.trainers.update(1)
        assert made.commit.begin(1)["bytes"] == 7.0
        assert made.fleet.committed == 1 and sent == [(1, [Copied(1)], threading.current_thread())]
        made.check_loaded()
