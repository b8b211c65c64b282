"""The fleet under random operations against a model: which replicas serve and get calls, and all laws hold."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.rollout import settle

from seamless_verl.errors import ReplicaLostError, ReplicaStateError, ReplicaVersionError, WeightsNotLoadedError
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.precedence import Precedence
from seamless_verl.rollout.replica import DEAD, LEGAL, PAUSED, RELEASED, SERVING, STALE, SYNCING, Slot, check_transition
from seamless_verl.rollout.routing import PrefixAffinity
from seamless_verl.tools.bench.stub_engine import StubEngine

T = TypeVar("T")
PICK = st.integers(0, 1 << 16)
NAMES = [f"r{number}" for number in range(4)]
IDS = st.lists(st.sampled_from(NAMES), unique=True, min_size=1)
MODE = st.sampled_from(PauseMode)
OVERTAKING = 3


class Device(StubEngine):
    """The true state of a replica, whatever the fleet has recorded; commands take a turn of the loop."""

    generating = True
    stuck = False

    async def pause(self, mode: PauseMode) -> None:
        await self._execute()
        self.generating = False

    async def resume(self) -> None:
        await self._execute()
        self.generating = True

    async def abort_all(self) -> None:
        await self._execute()
        assert not self.generating

    async def update_weights(self, version: int, weights: Any) -> None:
        """`weights` that are None cannot be loaded."""
        await self.pause(PauseMode.KEEP)
        if weights is None:
            raise WeightsNotLoadedError(self.replica_id, version, "there are none")
        self.version = version
        await self.resume()

    async def _execute(self) -> None:
        await asyncio.sleep(0)
        if self.stuck:
            await asyncio.Event().wait()
        self._check_alive()


def aged(ticket: int, version: int = 0) -> Precedence:
    """The place of a call that continues a conversation of this age."""
    return Precedence(version, False, 0, ticket)


@dataclass
class Waiting:
    task: asyncio.Task[Slot]
    ticket: int


@dataclass
class Model:
    states: dict[str, str] = field(default_factory=dict)
    devices: dict[str, Device] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    waiting: list[Waiting] = field(default_factory=list)


class AgainstAModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.fleet = Fleet(overtaking=OVERTAKING)
        self.model = Model()
        self.tickets = 0

    def teardown(self) -> None:
        for waiting in self.model.waiting:
            waiting.task.cancel()
        self.do(settle())
        assert self.fleet.metrics()["fleet/waiting"] == 0
        self.fleet.check_integrity()
        self.loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def expect(self, work: Coroutine[Any, Any, list[str]], ids: list[str], goal: str, legal: set[str]) -> None:
        """The operation succeeds on all of them, or is refused and changes nothing."""
        if any(name not in self.model.states for name in ids):
            with pytest.raises(ValueError, match="not in the fleet"):
                self.do(work)
        elif any(self.model.states[name] not in legal for name in ids):
            with pytest.raises(ReplicaStateError):
                self.do(work)
        else:
            assert self.do(work) == ids
            self.model.states.update(dict.fromkeys(ids, goal))

    @rule(name=st.sampled_from(NAMES), capacity=st.integers(1, 3), fresh=st.booleans())
    def add(self, name: str, capacity: int, fresh: bool) -> None:
        if self.model.states.get(name, DEAD) is not DEAD:
            return
        version = self.fleet.committed if fresh else None
        device = Device(name, version=version or 0)
        device.generating = fresh
        self.fleet.add(name, engine=device, control=device, capacity=capacity, version=version)
        self.model.devices[name] = device
        self.model.states[name] = SERVING if fresh else STALE

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: str) -> None:
        if self.model.states.pop(name, None) is not None:
            self.do(self.fleet.remove(name))

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        if name in self.model.states:
            self.fleet.lost(name, "its process died")
            self.model.states[name] = DEAD

    @rule()
    def commit(self) -> None:
        self.fleet.commit(self.fleet.committed + 1)

    @rule(ids=IDS, mode=MODE)
    def pause(self, ids: list[str], mode: PauseMode) -> None:
        self.expect(self.fleet.pause(ids, mode), ids, PAUSED, {SERVING})

    @rule(ids=IDS)
    def resume(self, ids: list[str]) -> None:
        self.expect(self.fleet.resume(ids), ids, SERVING, {PAUSED})

    @rule(ids=IDS)
    def release(self, ids: list[str]) -> None:
        self.expect(self.fleet.release(ids), ids, RELEASED, {SERVING, PAUSED, STALE})

    @rule(ids=IDS)
    def reclaimed(self, ids: list[str]) -> None:
        self.expect(self.fleet.reclaim(ids), ids, STALE, {RELEASED})

    @rule(ids=IDS)
    def begin_sync(self, ids: list[str]) -> None:
        self.expect(self.fleet.begin_sync(ids), ids, SYNCING, {PAUSED, STALE})

    @rule(ids=IDS)
    def end_sync(self, ids: list[str]) -> None:
        for name in ids:
            if self.model.states.get(name) == SYNCING:
                self.model.devices[name].version = self.fleet.committed
        self.expect(self.fleet.end_sync(ids, self.fleet.committed), ids, SERVING, {SYNCING})

    @rule(ids=IDS)
    def update_weights(self, ids: list[str]) -> None:
        self.expect(
            self.fleet.update_weights(ids, self.fleet.committed, "weights"), ids, SERVING, {SERVING, PAUSED, STALE}
        )

    @rule(ids=IDS)
    def sync_failed(self, ids: list[str]) -> None:
        self.expect(self.fleet.fail_sync(ids), ids, STALE, {SYNCING})

    @rule(first=IDS, second=IDS, which=PICK, mode=MODE)
    def two_at_once(self, first: list[str], second: list[str], which: int, mode: PauseMode) -> None:
        """Operations that overlap, and a death in the middle, end as in some order of them."""
        fleet = self.fleet
        if any(name not in self.model.states for name in first + second):
            return

        async def death() -> None:
            for _ in range(which % 3):
                await asyncio.sleep(0)
            if which % 4 == 0:
                fleet.lost(first[0], "its process died")

        async def both() -> list[object]:
            other = fleet.release(second) if which % 2 else fleet.resume(second)
            return await asyncio.gather(fleet.pause(first, mode), other, death(), return_exceptions=True)

        outcomes = self.do(both())
        assert all(isinstance(o, list | ReplicaStateError | None) for o in outcomes), outcomes
        self.model.states = {replica.replica_id: replica.state for replica in fleet.view}

    @precondition(lambda self: len(self.model.waiting) < 6)
    @rule(key=PICK, number=st.integers(1, 3))
    def call(self, key: int, number: int) -> None:
        for _ in range(number):
            self.tickets += 1
            task = self.loop.create_task(self.fleet.slots.acquire(f"session {key % 5}", aged(self.tickets)))
            self.model.waiting.append(Waiting(task, self.tickets))
        self.collect_granted()

    @precondition(lambda self: self.model.slots)
    @rule(which=PICK)
    def end(self, which: int) -> None:
        slot = self.model.slots.pop(which % len(self.model.slots))
        slot.release()
        slot.release()

    @precondition(lambda self: self.model.waiting)
    @rule(which=PICK, ends=st.booleans())
    def leave(self, which: int, ends: bool) -> None:
        """A client leaves the queue, perhaps at the moment at which it is granted a slot."""
        if ends and self.model.slots:
            self.model.slots.pop().release()
        waiting = self.model.waiting.pop(which % len(self.model.waiting))
        waiting.task.cancel()
        self.collect_granted()

    def collect_granted(self) -> None:
        """Collects the granted slots: oldest first, except for a few calls whose preferred replica had room."""
        self.do(settle(5))
        done = [waiting for waiting in self.model.waiting if waiting.task.done()]
        self.model.waiting = [waiting for waiting in self.model.waiting if not waiting.task.done()]
        oldest = min((waiting.ticket for waiting in self.model.waiting), default=1 << 30)
        assert all(waiting.ticket <= oldest + OVERTAKING for waiting in done)
        self.model.slots += [waiting.task.result() for waiting in done]

    @invariant()
    def serving_replicas_may_serve(self) -> None:
        before = {id(slot) for slot in self.model.slots}
        self.collect_granted()
        self.fleet.check_integrity()
        assert {replica.replica_id: replica.state for replica in self.fleet.view} == self.model.states
        for replica in self.fleet.view:
            device = self.model.devices[replica.replica_id]
            if replica.state is SERVING:
                assert device.generating and replica.version == device.version <= self.fleet.committed
            if replica.state in (PAUSED, RELEASED, SYNCING):
                assert not device.generating
            attached = [slot for slot in self.model.slots if slot.attached and slot.engine is device]
            assert replica.load == len(attached)
        for slot in self.model.slots:
            if id(slot) not in before and slot.attached:
                assert slot.replica.state is SERVING and slot.replica.version == self.fleet.committed


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def fleet_of(*names: str, capacity: int = 2, **options: Any) -> tuple[Fleet, dict[str, Device]]:
    fleet, devices = Fleet(**options), {name: Device(name) for name in names}
    for name, device in devices.items():
        fleet.add(name, engine=device, control=device, capacity=capacity, version=0)
    return fleet, devices


def test_an_illegal_transition_names_what_is_legal() -> None:
    refusal = r"replica a cannot go from released to serving by resume.*stale by reclaim"
    with pytest.raises(ReplicaStateError, match=refusal):
        check_transition("a", RELEASED, SERVING, "resume")
    with pytest.raises(ReplicaStateError, match="serving by resume"):
        check_transition("a", SYNCING, SERVING, "resume")


def test_only_a_resume_or_a_sync_lets_a_replica_serve() -> None:
    assert {source: by for (source, to), (by, _) in LEGAL.items() if to is SERVING} == {
        PAUSED: "resume",
        SYNCING: "end_sync",
    }


async def test_a_death_interrupts_what_is_being_done_to_a_replica() -> None:
    fleet, devices = fleet_of("a", "b")
    devices["a"].stuck = True
    slot = await fleet.slots.acquire("k", aged(1))
    pausing = asyncio.create_task(fleet.pause(["a", "b"], PauseMode.ABORT))
    await settle()
    assert not pausing.done()
    fleet.lost("a", "nobody heard of it for a while")
    assert await pausing == ["b"]
    assert not slot.attached or slot.replica.replica_id == "b"
    fleet.check_integrity()


async def test_a_control_that_finds_its_replica_gone_reports_it() -> None:
    fleet, devices = fleet_of("a")
    devices["a"].kill("no such process")
    assert await fleet.release(["a"]) == []
    assert fleet.view[0].state is DEAD


async def test_news_of_an_engine_that_was_replaced_changes_nothing() -> None:
    fleet, devices = fleet_of("a")
    fleet.lost("a", "died")
    again = Device("a")
    fleet.add("a", engine=again, control=again, capacity=1)
    fleet.lost("a", "old news", engine=devices["a"])
    assert fleet.view[0].state is STALE
    with pytest.raises(ReplicaLostError):
        await anext(devices["a"].generate(None))  # type: ignore[arg-type]


async def test_weights_that_are_not_the_committed_ones_are_not_served() -> None:
    fleet, devices = fleet_of("a")
    with pytest.raises(ReplicaVersionError, match="committed one is 0"):
        fleet.add("b", engine=devices["a"], control=devices["a"], capacity=1, version=3)
    await fleet.pause(["a"], PauseMode.KEEP)
    await fleet.begin_sync(["a"])
    with pytest.raises(ReplicaVersionError, match="version=1"):
        await fleet.end_sync(["a"], 1)
    fleet.commit(1)
    with pytest.raises(ReplicaVersionError, match="version=0"):
        await fleet.end_sync(["a"], 0)
    assert await fleet.end_sync(["a"], 1) == ["a"] and fleet.view[0].version == 1
    with pytest.raises(ValueError, match="older"):
        fleet.commit(0)


async def test_a_replica_that_waits_for_its_update_keeps_its_calls_and_takes_no_others() -> None:
    fleet, _ = fleet_of("a", "b", capacity=4)
    before = [await fleet.slots.acquire(f"k{number}", aged(number)) for number in range(4)]
    fleet.commit(1)
    later = [asyncio.create_task(fleet.slots.acquire(f"k{number}", aged(number))) for number in range(4, 7)]
    await settle()
    assert all(slot.attached for slot in before) and not any(task.done() for task in later)
    fleet.check_integrity()
    assert await fleet.update_weights(["b"], 1, "weights") == ["b"]
    for slot in before:
        slot.release()
    assert {(await task).replica.replica_id for task in later} == {"b"}
    assert [(view.outdated, view.has_slot) for view in fleet.view] == [(True, False), (False, True)]
    assert await fleet.update_weights(["a"], 1, "weights") == ["a"] and fleet.view[0].has_slot
    fleet.check_integrity()


async def test_weights_that_cannot_be_loaded_leave_a_replica_that_is_not_routed_to() -> None:
    fleet, devices = fleet_of("a", "b")
    fleet.commit(1)
    with pytest.raises(ReplicaVersionError, match="version=0"):
        await fleet.update_weights(["a"], 0, "weights")
    assert (
        await fleet.update_weights(["a"], 1, "weights") == ["a"] and fleet.view[0].version == devices["a"].version == 1
    )
    with pytest.raises(WeightsNotLoadedError, match="replica b could not load version 1"):
        await fleet.update_weights(["b"], 1, None)
    assert fleet.view[1].state is SYNCING and not devices["b"].generating
    assert await fleet.fail_sync(["b"]) == ["b"]
    fleet.check_integrity()


async def test_each_change_is_reported() -> None:
    changes: list[tuple[str, str]] = []
    fleet = Fleet(on_change=lambda view, why: changes.append((view.state, why)))
    device = Device("a")
    fleet.add("a", engine=device, control=device, capacity=1, version=0)
    await fleet.release(["a"])
    fleet.lost("a", "burnt")
    assert changes == [(SERVING, "added"), (PAUSED, "pause"), (RELEASED, "release"), (DEAD, "burnt")]


def keys_at(fleet: Fleet, replica_id: str) -> list[str]:
    preferred = PrefixAffinity().preferred(fleet.view)
    return [key for key in map(str, range(100)) if preferred(key) == replica_id]


async def test_a_slot_goes_to_the_oldest_call_that_prefers_the_replica_and_no_call_is_overtaken_for_ever() -> None:
    fleet, _ = fleet_of("a", "b", capacity=1, overtaking=3)
    on_a, on_b = keys_at(fleet, "a")[0], keys_at(fleet, "b")[0]
    slot, kept = await fleet.slots.acquire(on_a, aged(1)), await fleet.slots.acquire(on_b, aged(2))
    order = list[str]()

    async def queued(key: str, ticket: int) -> Slot:
        slot = await fleet.slots.acquire(key, aged(ticket))
        order.append(f"{ticket} on {slot.replica.replica_id}")
        return slot

    async def enter(key: str, *tickets: int) -> None:
        tasks.update({ticket: asyncio.create_task(queued(key, ticket)) for ticket in tickets})
        await settle()

    tasks: dict[int, asyncio.Task[Slot]] = {}
    await enter(on_b, 3)
    await enter(on_a, 5, 4, 6)
    for ticket in (4, 5):  # the oldest calls that prefer it
        slot.release()
        slot = await tasks[ticket]
    await enter(on_a, 0)  # whatever the age of 0 and 6, four calls have entered since 3 did
    for ticket in (3, 0, 6):
        slot.release()
        slot = await tasks[ticket]
    assert order == ["4 on a", "5 on a", "3 on a", "0 on a", "6 on a"]
    for last in (slot, kept):
        last.release()
    fleet.check_integrity()


async def test_replicas_that_start_together_share_the_queue() -> None:
    fleet, devices = fleet_of("a", "b", capacity=4)
    preferring_a, others = keys_at(fleet, "a")[:3], keys_at(fleet, "b")[:3]
    await fleet.pause(["a", "b"], PauseMode.KEEP)
    waiting = {
        key: asyncio.create_task(fleet.slots.acquire(key, aged(ticket)))
        for ticket, key in enumerate(others + preferring_a)
    }
    devices["b"].stuck = True
    resuming = asyncio.create_task(fleet.resume(["a", "b"]))
    await settle()
    assert [waiting[key].done() for key in preferring_a + others] == [True] * 3 + [False] * 3
    newcomer = asyncio.create_task(fleet.slots.acquire(keys_at(fleet, "b")[3], aged(9)))
    await settle()
    assert not newcomer.done()
    fleet.check_integrity()
    fleet.lost("b", "it never started")
    assert await resuming == ["a"]
    await settle()
    assert [waiting[key].done() for key in others] == [True, False, False]  # the oldest took the last slot
    for left in (newcomer, waiting[others[1]], waiting[others[2]]):
        left.cancel()
    await settle()
    fleet.check_integrity()


@pytest.mark.parametrize("why", ["it is full", "it takes too long"])
async def test_a_starting_preferred_replica_is_not_awaited_if(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seamless_verl.rollout.slots.RESUME_S", 0.0 if why == "it takes too long" else 60.0)
    fleet, devices = fleet_of("a", "b", capacity=2)
    preferring_a = keys_at(fleet, "a")
    if why == "it is full":
        for slot in [await fleet.slots.acquire(preferring_a[0], aged(ticket)) for ticket in range(4)]:
            if slot.replica.replica_id == "b":
                slot.release()
    await fleet.pause(["a"], PauseMode.KEEP)
    devices["a"].stuck = True
    resuming = asyncio.create_task(fleet.resume(["a"]))
    await settle()
    slot = await asyncio.wait_for(fleet.slots.acquire(preferring_a[2], aged(9)), 10)
    assert slot.replica.replica_id == "b"
    fleet.check_integrity()
    fleet.lost("a", "over")
    assert await resuming == []


async def test_replicas_that_load_one_after_another_share_the_calls_of_a_new_version() -> None:
    fleet, _ = fleet_of("a", "b", "c", capacity=9)
    keys = {name: keys_at(fleet, name)[:3] for name in ("a", "b", "c")}
    running = await fleet.slots.acquire(keys["b"][0], aged(1))
    fleet.commit(1)
    fleet.expect(["a", "b", "c"])
    waiting = {
        name: [asyncio.create_task(fleet.slots.acquire(key, aged(2))) for key in keys[name]] for name in ("a", "b", "c")
    }
    await settle()
    assert running.attached and not any(task.done() for tasks in waiting.values() for task in tasks)
    for round_, name in enumerate(("b", "c", "a")):
        assert await fleet.update_weights([name], 1, "weights") == [name]
        await settle()
        served = [name for name, tasks in waiting.items() if all(task.done() for task in tasks)]
        assert set(served) == set(("b", "c", "a")[: round_ + 1])
        fleet.check_integrity()
    for name, tasks in waiting.items():
        assert {task.result().replica.replica_id for task in tasks} == {name}


@pytest.mark.parametrize(
    "why", ["could not load", "died", "released its memory", "takes too long", "is full", "is busy"]
)
async def test_a_load_is_not_awaited_of_a_replica_that(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call goes to the one that has loaded, which is busier."""
    monkeypatch.setattr("seamless_verl.rollout.slots.LOADS_S", 0.0 if why == "takes too long" else 60.0)
    fleet, _ = fleet_of("a", "b", capacity=4)
    on_a = keys_at(fleet, "a")[0]
    await fill(fleet, "b", 2)
    await fill(fleet, "a", {"is full": 4, "is busy": 2}.get(why, 0))
    fleet.commit(1)
    fleet.expect(["a", "b"])
    assert await fleet.update_weights(["b"], 1, "weights") == ["b"]
    call = asyncio.create_task(fleet.slots.acquire(on_a, aged(1)))
    await settle()
    assert call.done() == (why in ("is full", "is busy", "takes too long"))
    if why == "could not load":
        with pytest.raises(WeightsNotLoadedError):
            await fleet.update_weights(["a"], 1, None)
        assert not call.done()
        await fleet.fail_sync(["a"])
    elif why == "died":
        fleet.lost("a", "over")
    elif why == "released its memory":
        await fleet.release(["a"])
    assert (await asyncio.wait_for(call, 10)).replica.replica_id == "b"
    fleet.check_integrity()
    assert fleet.view[0].expected == (why in ("is full", "is busy"))


async def fill(fleet: Fleet, replica_id: str, number: int) -> None:
    """Gives so many slots of the replica to calls."""
    others = [name for name in fleet if name != replica_id]
    await fleet.pause(others, PauseMode.KEEP)
    for _ in range(number):
        assert (await fleet.slots.acquire("filling", aged(0))).replica.replica_id == replica_id
    await fleet.resume(others)


async def test_a_call_waits_no_longer_when_it_prefers_a_full_one_that_now_resumes() -> None:
    """It waited for its second choice, which loads; the law of waiting calls looks at the first."""
    fleet, _ = fleet_of("a", "b", "c", capacity=4)
    ranked = PrefixAffinity()
    on_a = next(
        key
        for key in map(str, range(500))
        if ranked.preferred(fleet.view)(key) == "a"
        and ranked.preferred([view for view in fleet.view if view.replica_id != "a"])(key) == "b"
    )
    await fill(fleet, "a", 4)
    await fill(fleet, "c", 1)
    await fleet.pause(["a"], PauseMode.KEEP)
    fleet.commit(1)
    fleet.expect(["b"])
    assert await fleet.update_weights(["c"], 1, "weights") == ["c"]
    call = asyncio.create_task(fleet.slots.acquire(on_a, aged(1)))
    await settle()
    assert not call.done()
    fleet.check_integrity()
    fleet.expect(["a"])
    fleet.check_integrity()
    assert (await asyncio.wait_for(call, 10)).replica.replica_id == "c"


async def test_the_time_of_one_update_does_not_end_what_the_next_one_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = fleet_of("a", "b")
    monkeypatch.setattr("seamless_verl.rollout.slots.LOADS_S", 0.02)
    fleet.commit(1)
    fleet.expect(["a", "b"])
    assert await fleet.update_weights(["a", "b"], 1, "weights") == ["a", "b"]
    monkeypatch.setattr("seamless_verl.rollout.slots.LOADS_S", 60.0)
    fleet.expect(["a", "b"])
    assert not any(view.expected for view in fleet.view), "they have the committed weights"
    fleet.commit(2)
    fleet.expect(["a", "b"])
    await asyncio.sleep(0.05)
    assert all(view.expected for view in fleet.view)


async def test_a_cut_is_explained_by_a_pause_since_the_grant_even_when_it_is_over() -> None:
    fleet, _ = fleet_of("a")
    before = await fleet.slots.acquire("k", aged(1))
    assert before.unexplained
    await fleet.pause(["a"], PauseMode.ABORT)
    await fleet.resume(["a"])
    after = await fleet.slots.acquire("k", aged(2))
    assert (before.unexplained, after.unexplained) == (False, True)


async def test_a_control_that_does_not_reply_in_time_loses_its_replica_and_names_it() -> None:
    changes: list[tuple[str, str]] = []
    fleet = Fleet(
        deadline_s=0.05,
        on_change=lambda view, why: changes.append((view.replica_id, why)),
    )
    for name in ("good", "hung"):
        device = Device(name)
        device.stuck = name == "hung"
        fleet.add(name, engine=device, control=device, capacity=2, version=0)
    slot = await fleet.slots.acquire("", aged(0))
    assert await fleet.pause(["good", "hung"], PauseMode.KEEP) == ["good"]
    assert {view.replica_id: view.state for view in fleet.view} == {"good": PAUSED, "hung": DEAD}
    assert any(name == "hung" and "paused" in why and "0.05 s" in why for name, why in changes)
    assert [fleet.is_late(name) for name in ("good", "hung")] == [False, True]
    slot.release()
    fleet.check_integrity()


@pytest.mark.parametrize("meanwhile", ["nothing", "it died", "it was replaced", "it was removed"])
async def test_a_late_reply_is_a_sign_of_life_unless_the_replica_died_or_is_another(meanwhile: str) -> None:
    replied: list[str] = []
    fleet = Fleet(deadline_s=0.05, on_late_reply=replied.append)
    device, done = Device("a"), asyncio.Event()
    fleet.add("a", engine=device, control=device, capacity=2, version=0)

    async def slow(mode: PauseMode) -> None:
        await done.wait()
        if meanwhile == "it died":
            raise ReplicaLostError("a", "its server died")

    device.pause = slow  # type: ignore[method-assign]
    assert await fleet.pause(["a"], PauseMode.KEEP) == [] and fleet.is_late("a")
    assert fleet.view[0].state is DEAD and not replied
    if meanwhile == "it was replaced":
        fleet.add("a", engine=(other := Device("a")), control=other, capacity=2, version=0)
        assert not fleet.is_late("a")
    elif meanwhile == "it was removed":
        await fleet.remove("a")
    done.set()
    await settle()
    assert replied == (["a"] if meanwhile == "nothing" else [])
