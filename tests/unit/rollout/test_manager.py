"""Data planes that are killed at any instant: commands are repeated, and end as if they ran once."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from support.rollout import settle

from seamless_verl.errors import WeightsNotLoadedError
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.manager import FleetSnapshot, ReplicaSnapshot, RolloutManager
from seamless_verl.rollout.precedence import Precedence
from seamless_verl.rollout.replica import (
    DEAD,
    PAUSED,
    RELEASED,
    SERVING,
    STALE,
    SYNCING,
    ReplicaState,
    ReplicaView,
    Slot,
)

T = TypeVar("T")
NAMES = ["r0", "r1", "r2"]
SHARED = NAMES[:2]  # on the trainer's devices
PHASES = [phase for phase in Phase if phase is not Phase.shrink]  # shrinking takes minutes here, and the steps are few
TROUBLE = st.sampled_from(["kill first", "kill other", "lose first", "lose other"])


@dataclass
class Server:
    """A replica's server: the true state of the replica."""

    name: str
    version: int = 0
    paused: PauseMode | None = None
    routed: Callable[[str], bool] = lambda name: False
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    load_turns: int = 0  # that a load takes
    hangs: Callable[[], Awaitable[object]] | None = None

    async def pause(self, mode: PauseMode) -> None:
        """Called by the first data plane, after the other one has stopped routing to the replica."""
        assert not self.routed(self.name), self.name
        await asyncio.sleep(0)
        self.paused = mode
        await asyncio.sleep(0)

    async def resume(self) -> None:
        await asyncio.sleep(0)
        self.paused = None
        await asyncio.sleep(0)

    async def abort_all(self) -> None:
        await self.pause(PauseMode.ABORT)

    async def update_weights(self, version: int, weights: Collection[str]) -> None:
        """Only the replicas named in `weights` can load. The load ends also if its caller is killed."""
        loading = asyncio.ensure_future(self._update_weights(version, weights))
        loading.add_done_callback(asyncio.Future.exception)
        await asyncio.shield(loading)

    async def _update_weights(self, version: int, weights: Collection[str]) -> None:
        async with self.updating:
            await self.pause(PauseMode.KEEP)
            if self.name not in weights:
                raise WeightsNotLoadedError(self.name, version, "no reason")
            await settle(1 + self.load_turns)
            if self.hangs is not None:
                await self.hangs()
            self.version = version
            await self.resume()


class NoControl:
    """The control in the other data plane, which commands no engine."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def abort_all(self) -> None: ...

    async def update_weights(self, version: int, weights: Any) -> None: ...


class Connection:
    """A data plane's engine, of which only the connection matters here."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id

    def close(self) -> None: ...


@dataclass
class Process:
    """One process of a data plane."""

    manager: RolloutManager
    lost: set[str]
    alive: bool = True
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)


class World:
    """The first data plane and one that mirrors it, both over the same servers."""

    def __init__(self) -> None:
        self.servers = {name: Server(name, routed=self.routed) for name in NAMES}
        self.stored: dict[str, bytes] = {}
        self.processes = {plane: self.process(plane) for plane in ("first", "other")}
        self.restarts = 0

    def process(self, plane: str) -> Process:
        snapshot: FleetSnapshot = pickle.loads(self.stored[plane]) if plane in self.stored else FleetSnapshot()
        fleet = Fleet()
        fleet.commit(snapshot.committed)
        process: Process

        async def reconnect() -> bool:
            if not process.lost:
                return False
            await asyncio.sleep(0)
            for name in sorted(process.lost):
                server = self.servers[name]
                async with server.updating:  # it says so after a load that is under way
                    state, version = snapshot.restored_state(name, server.version, server.paused)
                control = server if plane == "first" else NoControl()
                if state is STALE and server.paused is None:
                    server.paused = PauseMode.KEEP
                made: Any = Connection(name)
                fleet.add(name, engine=made, control=control, capacity=4, state=state, version=version)
            process.lost.clear()
            return True

        async def save() -> None:
            saved = pickle.dumps(snapshot)
            await asyncio.sleep(0)
            if process.alive:
                self.stored[plane] = saved

        async def forward(command: str, *arguments: Any) -> None:
            if plane == "first":
                await self.call("other", command, *arguments)

        manager = RolloutManager(fleet, snapshot, save=save, reconnect=reconnect, forward=forward)
        process = Process(manager, set(NAMES))
        return process

    async def call(self, plane: str, command: str, *arguments: Any) -> Any:
        """As Ray does it: a call without a reply is repeated."""
        while True:
            process = self.processes[plane]
            task = asyncio.ensure_future(getattr(process.manager, command)(*arguments))
            process.tasks.add(task)
            await asyncio.wait({task})
            if process.alive:
                return task.result()

    def trouble(self, kind: str, name: str) -> None:
        what, plane = kind.split()
        process = self.processes[plane]
        if what == "kill":
            process.alive = False
            for task in process.tasks:
                task.cancel()
            self.processes[plane] = self.process(plane)
            self.restarts += 1
        elif name not in process.lost:
            process.manager.fleet.lost(name, "the connection broke")
            process.lost.add(name)

    def routed(self, name: str) -> bool:
        """Whether the data plane that commands no engine routes calls to it."""
        return self.states("other").get(name, (STALE, None))[0] is SERVING

    def states(self, plane: str) -> dict[str, tuple[ReplicaState, int | None]]:
        return {view.replica_id: (view.state, view.version) for view in self.processes[plane].manager.fleet.view}


class TrainerCommands(RuleBasedStateMachine):
    """A trainer's commands; `troubles` happen while they are executed."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = World()
        self.version = self.orders = 0
        self.training = self.released = False
        self.updated: set[str] = set()  # replicas that have the committed weights
        self.calls: list[asyncio.Task[Slot]] = []  # which wait for a slot, or have one

    def teardown(self) -> None:
        for call in self.calls:
            call.cancel()
        self.do(settle(60))
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    async def with_troubles(self, troubles: list[tuple[int, str, str]], work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        for turns, kind, name in troubles:
            await settle(turns)
            if not task.done():
                self.world.trouble(kind, name)
        return await asyncio.wait_for(task, 10)

    def execute(self, troubles: list[tuple[int, str, str]], work: Coroutine[Any, Any, T]) -> T:
        result = self.do(self.with_troubles(troubles, work))
        self.do(settle(40))
        for plane in ("first", "other"):  # as the data planes do by themselves
            self.do(self.world.call(plane, "quiesce", ()))
        return result

    @rule(plane=st.sampled_from(["first", "other"]), key=st.integers(0, 9), number=st.integers(1, 6))
    def begin_calls(self, plane: str, key: int, number: int) -> None:
        """Of as many conversations; a data plane has slots for 12. Where it dies they are not heard of again."""
        fleet = self.world.processes[plane].manager.fleet

        async def begin() -> None:
            for each in range(number):
                place = Precedence(self.version, False, 0, len(self.calls))
                self.calls.append(asyncio.ensure_future(fleet.slots.acquire(f"{key + each}", place)))

        self.do(begin())
        self.do(settle(3))
        fleet.check_integrity()

    @rule()
    def end_calls(self) -> None:
        """Of those that have a slot, the older half."""
        having = [call for call in self.calls if call.done()]
        for call in having[: (len(having) + 1) // 2]:
            call.result().release()
            self.calls.remove(call)
        self.do(settle(3))
        for process in self.world.processes.values():
            process.manager.fleet.check_integrity()

    TROUBLES = st.lists(st.tuples(st.integers(0, 30), TROUBLE, st.sampled_from(NAMES)), max_size=3)

    @rule(troubles=TROUBLES)
    def commit(self, troubles: list[tuple[int, str, str]]) -> None:
        self.version += 1
        self.released = False
        assert self.execute(troubles, self.update_weights(self.version, None)) == set(NAMES)
        self.updated = set(NAMES)
        self.check()

    @rule(troubles=TROUBLES, name=st.sampled_from(NAMES))
    def commit_that_fails_on_one(self, troubles: list[tuple[int, str, str]], name: str) -> None:
        self.version += 1
        self.released = False
        self.updated = set(NAMES) - {name}
        assert self.execute(troubles, self.update_weights(self.version, name)) == self.updated
        self.check()

    async def update_weights(self, version: int, failing: str | None) -> set[str]:
        """As WeightCommit does it, one replica after the other; returns those that have the weights."""
        done: set[str] = set()
        await self.world.call("first", "commit", version)
        for name in NAMES:
            await self.world.call("first", "reclaim_memory", [name])
            done.update(await self.world.call("first", "update_weights", [name], version, set(NAMES) - {failing}))
        return done

    @rule(troubles=TROUBLES)
    def lend_what_released_its_memory(self, troubles: list[tuple[int, str, str]]) -> None:
        """Without a commit: the committed weights are loaded again, all at once."""
        if self.version:
            self.released = False
            serving = self.execute(troubles, self.reload())
            assert serving == set(SHARED)
            self.updated |= set(SHARED)
            self.check()

    async def reload(self) -> set[str]:
        """As WeightCommit does it with replicas that had released their memory."""
        await self.world.call("first", "reclaim_memory", SHARED)
        return set(await self.world.call("first", "update_weights", SHARED, self.version, set(NAMES)))

    @rule(troubles=TROUBLES, cut=st.sampled_from([(), SHARED[:1], SHARED]))
    def pause(self, troubles: list[tuple[int, str, str]], cut: list[str]) -> None:
        self.training = True
        self.execute(troubles, self.world.call("first", "pause", SHARED, cut))
        self.check()

    @rule(troubles=TROUBLES)
    def resume(self, troubles: list[tuple[int, str, str]]) -> None:
        self.training = False
        self.execute(troubles, self.world.call("first", "resume", SHARED))
        self.check()

    @rule(troubles=TROUBLES)
    def release_memory(self, troubles: list[tuple[int, str, str]]) -> None:
        """Releases memory; of replicas whose memory is released already the command returns none."""
        self.orders += 1
        released = self.execute(troubles, self.world.call("first", "release_memory", SHARED, self.orders))
        assert sorted(released) == ([] if self.released else SHARED)
        self.released = True
        self.updated -= set(SHARED)
        self.check()

    def check(self) -> None:
        """At rest."""
        for plane in ("first", "other"):
            fleet = self.world.processes[plane].manager.fleet
            fleet.check_integrity()
            assert not any(view.coming for view in fleet.view), "calls wait for what does not come"
            for name, (state, version) in self.world.states(plane).items():
                server = self.world.servers[name]
                assert state is not DEAD
                if state is SERVING:
                    assert server.paused is None and version == server.version, (plane, name)
                    assert not (self.training and name in SHARED), "it generates where training computes"
                if state in (SERVING, PAUSED) and name in self.updated:
                    assert version == self.version
                if name in self.updated:
                    assert state is (PAUSED if self.training and name in SHARED else SERVING), (plane, name)
                if plane == "first" and self.training and name in SHARED and state is PAUSED:
                    assert server.paused is not None


TrainerCommands.TestCase.settings = settings(max_examples=120, stateful_step_count=12, deadline=None, phases=PHASES)
TestDataPlanesThatDie = TrainerCommands.TestCase


class CommandsBesideLoads(TrainerCommands):
    """The same, and commands of the trainer beside the loads of a commit, as it gives them from another thread."""

    COMMANDS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["pause", "resume"])), min_size=1, max_size=3)

    @rule(troubles=TrainerCommands.TROUBLES, commands=COMMANDS, slow=st.sampled_from(NAMES), turns=st.integers(0, 40))
    def commit_beside_commands(
        self, troubles: list[tuple[int, str, str]], commands: list[tuple[int, str]], slow: str, turns: int
    ) -> None:
        self.version += 1
        self.released = False
        self.world.servers[slow].load_turns = turns

        async def command() -> None:
            for turns, name in commands:
                await settle(turns)
                await self.world.call("first", name, SHARED)
                self.training = name == "pause"
                servers = [self.world.servers[shared] for shared in SHARED]
                assert name == "resume" or not any(server.updating.locked() for server in servers), "training computes"

        async def both() -> set[str]:
            process = self.world.processes["first"].manager
            process.fleet._on_change = Transitions(process)
            loaded, _ = await asyncio.gather(self.update_weights(self.version, None), command())
            return loaded

        assert self.execute(troubles, both()) == set(NAMES)
        self.world.servers[slow].load_turns = 0
        self.updated = set(NAMES)
        self.check()


DURING_LOAD = frozenset(
    {
        (SERVING, PAUSED),  # the load begins; or it has ended, and training has the device
        (PAUSED, SYNCING),  # the load begins
        (STALE, SYNCING),  # the load begins
        (SYNCING, SERVING),  # its own load has ended, and perhaps not that of another of the same command
        (SYNCING, STALE),  # it could not load
        *((state, DEAD) for state in ReplicaState if state is not DEAD),  # its load is interrupted
        (DEAD, STALE),  # another process is attached in its place
    }
)
"""What may happen to a replica from the begin of `RolloutManager.update_weights` to its end, beside others' commands.

One that is reconnected meanwhile is in the state in which it is found, and is loaded again before the end. All other
commands for it wait for the end, and training gets its device after that.
"""


class Transitions:
    """Of replicas that load: all of them may happen during a load."""

    def __init__(self, manager: RolloutManager) -> None:
        self.manager = manager
        self.last = {view.replica_id: view.state for view in manager.fleet.view}

    def __call__(self, view: ReplicaView, reason: str) -> None:
        name, before = view.replica_id, self.last.get(view.replica_id)
        self.last[name] = view.state
        if name in self.manager.loading and reason != "restored":
            assert (before, view.state) in DURING_LOAD, (name, before, view.state, reason)


CommandsBesideLoads.TestCase.settings = settings(max_examples=60, stateful_step_count=12, deadline=None, phases=PHASES)
TestCommandsBesideLoads = CommandsBesideLoads.TestCase


async def test_a_load_that_hangs_delays_commands_for_its_own_replica_alone() -> None:
    world = World()
    await world.call("first", "update_weights", NAMES, 0, set(NAMES))
    manager, ended = world.processes["first"].manager, asyncio.Event()
    world.servers["r2"].hangs = ended.wait
    await world.call("first", "commit", 1)
    load = asyncio.create_task(world.call("first", "update_weights", ["r2"], 1, set(NAMES)))
    await settle()
    async with asyncio.timeout(10):
        assert await world.call("first", "pause", SHARED) == {"r0": 0, "r1": 0}
        assert await world.call("first", "resume", SHARED) == SHARED
        assert list(await world.call("first", "release_memory", SHARED, 1)) == SHARED
        assert await world.call("first", "reclaim_memory", SHARED) == SHARED
        assert await world.call("first", "update_weights", SHARED, 1, set(NAMES)) == SHARED
    waiting = [asyncio.create_task(world.call("first", *one)) for one in (("pause", ["r2"]), ("commit", 2))]
    await settle(100)
    assert manager.loading == {"r2"} and not load.done() and not any(one.done() for one in waiting)
    assert world.states("first")["r2"] == (SYNCING, None) and manager.fleet.committed == 1
    ended.set()
    assert await load == ["r2"] and not manager.loading
    await asyncio.gather(*waiting)
    assert world.states("first")["r2"] == (PAUSED, 1) and world.servers["r2"].paused is not None
    assert manager.fleet.committed == 2


@pytest.mark.parametrize(("cut", "paused"), [((), PauseMode.KEEP), (SHARED, PauseMode.ABORT)])
async def test_a_pause_freezes_the_calls_or_cuts_them(cut: list[str], paused: PauseMode) -> None:
    world = World()
    await world.call("first", "commit", 1)
    await world.call("first", "update_weights", NAMES, 1, set(NAMES))
    await world.call("first", "pause", SHARED, cut)
    assert [world.servers[name].paused for name in NAMES] == [paused, paused, None]
    assert await world.call("first", "resume", SHARED) == SHARED


@pytest.mark.parametrize("plane", ["first", "other"])
async def test_after_a_commit_calls_wait_for_the_replicas_that_will_load_and_serve(plane: str) -> None:
    world = World()
    await world.call("first", "update_weights", NAMES, 0, set(NAMES))
    await world.call("first", "pause", SHARED[:1])

    def expected() -> list[str]:
        return [view.replica_id for view in world.processes[plane].manager.fleet.view if view.expected]

    assert expected() == []
    await world.call("first", "commit", 1)
    assert expected() == NAMES[1:], "training has the device of the first"
    await world.call("first", "update_weights", NAMES[:1], 1, set(NAMES))
    await world.call("first", "update_weights", NAMES[2:], 1, set(NAMES))
    assert expected() == NAMES[1:2]
    await world.call("first", "release_memory", NAMES[1:2], 1)
    assert expected() == []
    await world.call("first", "reclaim_memory", NAMES[1:2])
    assert expected() == []
    await world.call("first", "update_weights", NAMES[1:2], 1, NAMES[:1])
    assert expected() == [], "it could not load"


class Watched(Server):
    """Which replicas are expected in the data planes while this one loads."""

    seen: ClassVar[list[list[str]]] = []
    world: World

    async def _update_weights(self, version: int, weights: Collection[str]) -> None:
        fleets = [process.manager.fleet for process in self.world.processes.values()]
        self.seen.extend([view.replica_id for view in fleet.view if view.expected] for fleet in fleets)
        await super()._update_weights(version, weights)


@pytest.mark.parametrize("others_serve", [True, False])
async def test_a_load_outside_a_commit_is_awaited_where_nothing_else_serves(others_serve: bool) -> None:
    """As of a replica that was started again, or that takes its memory back between two updates of a step."""
    world = World()
    await world.call("first", "update_weights", NAMES, 0, set(NAMES))
    lent = SHARED if others_serve else NAMES
    await world.call("first", "release_memory", lent, 1)
    await world.call("first", "reclaim_memory", lent)
    watched = Watched(NAMES[0], routed=world.routed)
    watched.world, watched.seen[:] = world, []
    for process in world.processes.values():
        replica = process.manager.fleet._replicas[NAMES[0]]
        replica.control = watched if process is world.processes["first"] else replica.control
    await world.call("first", "update_weights", lent, 0, set(NAMES))
    assert watched.seen == ([[], []] if others_serve else [NAMES, NAMES])


@pytest.mark.parametrize("plane", ["first", "other"])
async def test_a_replica_whose_device_training_has_takes_no_calls_when_it_has_loaded(plane: str) -> None:
    """It serves for a moment then; a call that began would be frozen for as long as training computes."""
    world = World()
    await world.call("first", "update_weights", NAMES, 0, set(NAMES))
    await world.call("first", "pause", NAMES)
    fleet = world.processes[plane].manager.fleet
    places = [Precedence(0, False, 0, number) for number in range(8)]
    calls = [asyncio.create_task(fleet.slots.acquire(str(place.ticket), place)) for place in places]
    await world.call("first", "commit", 1)
    for name in NAMES[:2]:
        await world.call("first", "update_weights", [name], 1, set(NAMES))
    assert not any(call.done() for call in calls)
    await world.call("first", "resume", NAMES)
    assert {call.result().replica.replica_id for call in calls if call.done()} == set(NAMES[:2])
    assert [view.replica_id for view in fleet.view if view.expected] == NAMES[2:], "its turn comes"
    await world.call("first", "update_weights", NAMES[2:], 1, set(NAMES))
    await settle()
    assert {call.result().replica.replica_id for call in calls} == set(NAMES)
    fleet.check_integrity()


async def test_an_order_that_is_repeated_while_it_is_executed_has_the_same_result() -> None:
    world = World()
    await world.call("first", "update_weights", NAMES, 0, set(NAMES))
    twice = await asyncio.gather(*(world.call("first", "release_memory", SHARED, 1) for _ in range(2)))
    assert [list(released) for released in [*twice, await world.call("first", "release_memory", SHARED, 1)]] == [
        SHARED
    ] * 3


@pytest.mark.parametrize(
    ("stored", "version", "paused", "found"),
    [
        (ReplicaSnapshot(SERVING, 3), 3, None, (SERVING, 3)),
        (ReplicaSnapshot(SERVING, 3), 3, PauseMode.KEEP, (PAUSED, 3)),
        (ReplicaSnapshot(SERVING, 2), 2, None, (SERVING, 2)),  # it has not had its turn in the update
        (ReplicaSnapshot(SERVING, 2, lost=True), 2, None, (STALE, None)),  # it missed its turn
        (ReplicaSnapshot(SERVING, 3, lost=True), 3, None, (SERVING, 3)),
        (ReplicaSnapshot(SERVING, 2), 3, None, (STALE, None)),  # its weights were not loaded by a command
        (ReplicaSnapshot(SYNCING), 3, PauseMode.KEEP, (SYNCING, None)),
        (ReplicaSnapshot(RELEASED), 3, PauseMode.ABORT, (RELEASED, None)),
        (ReplicaSnapshot(STALE), 3, None, (STALE, None)),
        (None, 3, None, (STALE, None)),
    ],
)
def test_the_restored_state_of_a_replica(
    stored: ReplicaSnapshot | None, version: int, paused: PauseMode | None, found: tuple[ReplicaState, int | None]
) -> None:
    snapshot = FleetSnapshot(committed=3, replicas={} if stored is None else {"r": stored})
    assert snapshot.restored_state("r", version, paused) == found
