"""Commits whose replicas load in the background: random schedules over the real rollout manager and fleet.

The engines are stubs, and the staged memory is a number. A load reads it at its begin and its end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.errors import WeightsNotLoadedError
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.manager import FleetSnapshot, RolloutManager
from seamless_verl.rollout.replica_state import DEAD, PAUSED, RELEASED, SERVING, STALE
from seamless_verl.rollout.routing import PrefixAffinity
from seamless_verl.testing.stub_engine import StubEngine

pytestmark = pytest.mark.integration
T = TypeVar("T")
NAMES = ["replica-0", "replica-1", "replica-2", "replica-3"]
SHARED = NAMES[:2]  # on the trainer's devices
WAIT_S = 30


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
            assert weights == [self.memory.version] == [version], "mapped another version"
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


class Client:
    """The data plane client: the manager's commands, executed in the loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, manager: RolloutManager) -> None:
        self.loop, self.manager = loop, manager
        remote = {"checked_metrics": self.checked_metrics, "execute": self.execute}
        self.actor = SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in remote.items()})

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def execute(self, command: str, *arguments: Any) -> Any:
        return self.do(getattr(self.manager, command)(*arguments))

    def checked_metrics(self, loading: bool = False) -> dict[str, float]:
        async def check() -> dict[str, float]:
            async with self.manager.exclusive():
                self.manager.fleet.check_integrity()
            return {}

        return self.do(check())


class Job:
    """A trainer's thread with its commit, over replicas of two hosts."""

    def __init__(self, client: Client, engines: dict[str, LoadingEngine], memory: Memory, released: bool) -> None:
        from seamless_verl.weights.commit import WeightCommit

        self.client, self.engines, self.memory, self.released = client, engines, memory, released
        self.version = 0
        trainers: Any = SimpleNamespace(stage_weights=self.stage_weights, free_cached_memory=lambda: None)
        replicas: Any = [
            SimpleNamespace(replica_id=name, shares_device=name in SHARED, devices=(name,)) for name in NAMES
        ]
        hosts = {name: str(int(name in SHARED)) for name in NAMES}
        data_plane: Any = client
        self.commit = WeightCommit(data_plane, trainers, replicas, None, released=released, hosts=hosts)
        self.commit.pauses_s = lambda loaded: [0.0] * len(loaded)  # type: ignore[method-assign]

    def stage_weights(self, version: int) -> Collection[int]:
        alive = {view.replica_id for view in self.fleet.view if view.state is not DEAD}
        assert not self.memory.loading & alive, "staged while a replica loads"
        self.memory.version = version
        return [version]

    @property
    def fleet(self) -> Fleet:
        return self.client.manager.fleet

    @property
    def alive(self) -> list[str]:
        return [view.replica_id for view in self.fleet.view if view.state is not DEAD]

    def commit_next(self) -> None:
        self.version += 1
        self.commit(self.version)
        assert self.fleet.committed == self.version == self.memory.version

    def reclaim(self) -> None:
        """As a computation of the trainer does it."""
        self.commit.wait_for_devices()
        assert not self.memory.loading & set(SHARED) & set(self.alive), "the device loads, and training takes it"
        self.client.execute("release_memory" if self.released else "pause", SHARED)

    def lend(self) -> None:
        if not self.released:
            self.client.execute("resume", SHARED)
        elif self.version:
            self.commit.lend([name for name in SHARED if name in self.alive])

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


@contextmanager
def job(released: bool = False) -> Iterator[Job]:
    from seamless_verl.weights import commit as module

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    fleet, memory = Fleet(policy=PrefixAffinity()), Memory()
    engines = {name: LoadingEngine(name, memory) for name in NAMES}
    for name, engine in engines.items():
        fleet.add(name, engine=engine, control=engine, capacity=4)
    client = Client(loop, RolloutManager(fleet, FleetSnapshot(), save=lambda: None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ray", SimpleNamespace(get=lambda reply: reply))  # replies are results
        patch.setattr(module, "one_per_host", list)
        made = Job(client, engines, memory, released)
        try:
            yield made
        finally:
            for name in made.alive:
                made.kill(name)
            if made.commit.loads is not None:
                made.commit.loads.wait()
            loop.call_soon_threadsafe(loop.stop)
            thread.join(WAIT_S)
            loop.close()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["commit", "commit", "reclaim", "lend", "kill", "fail", "mend", "slow", "wait"]),
        st.sampled_from(NAMES[1:]),  # the first one lives, so that one always can serve
    ),
    min_size=3,
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(STEPS, st.booleans())
def test_any_schedule_keeps_the_laws(steps: list[tuple[str, str]], released: bool) -> None:
    """No load sees two versions, training gets devices on which nothing loads, and all who live get each version."""
    with job(released) as made:
        for step, name in steps:
            engine = made.engines[name]
            match step:
                case "commit":
                    made.commit_next()
                case "reclaim":
                    made.reclaim()
                case "lend":
                    made.lend()
                case "kill":
                    made.kill(name)
                case "fail" | "mend":
                    made.commit.wait()
                    engine.failing = step == "fail"
                case "slow":
                    engine.turns = 60 - engine.turns
                case "wait" if made.version:
                    made.check_loaded()
        made.commit_next()
        made.check_loaded()


def test_the_trainer_goes_on_while_a_replica_loads_and_the_next_commit_waits() -> None:
    with job() as made:
        made.engines["replica-3"].stuck = True
        made.commit_next()
        made.commit.wait_for_devices()
        assert made.engines["replica-0"].version == 1 and made.commit.loads is not None and made.commit.loads.open
        next_commit = threading.Thread(target=made.commit_next)
        next_commit.start()
        next_commit.join(0.2)
        assert next_commit.is_alive() and made.memory.version == 1
        made.kill("replica-3")
        next_commit.join(WAIT_S)
        made.check_loaded()
        assert [view.state for view in made.fleet.view] == [SERVING, SERVING, SERVING, DEAD]
        assert made.commit.times.waited_s > 0.1


def test_what_could_not_load_is_counted_and_the_metrics_of_loads_come_with_the_next_commit() -> None:
    with job() as made:
        made.commit(1)
        made.commit.wait()
        made.engines["replica-3"].failing = True
        metrics = made.commit(2)
        assert metrics["seamless/commit/not_loaded"] == 0 and 0 < metrics["seamless/commit/trainer_share"] < 1
        assert made.commit(3)["seamless/commit/not_loaded"] == 1


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
