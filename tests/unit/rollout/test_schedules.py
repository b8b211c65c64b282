"""Random schedules of pauses, syncs, releases, deaths and cancellations under running calls, directly and over TCP."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rollout import World, call, check_prefix, check_whole, settle, world

from seamless_verl.rollout.call import Call
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.replica import DEAD, PAUSED, RELEASED, SERVING, STALE
from seamless_verl.trajectory.records import TokenChunk

REPLICAS = ["a", "b", "c"]


@dataclass(frozen=True)
class Step:
    """One operation on one replica or call, and how many turns of the loop pass before the next."""

    what: str
    which: int
    turns: int


WHAT = ["keep", "abort", "resume", "sync", "release", "reclaim", "kill", "start", "cancel", "call"]


def step_of(dice: bytes) -> Step:
    return Step(WHAT[dice[0] % len(WHAT)], dice[1] % 12, dice[2] % 13)


STEP = st.binary(min_size=3, max_size=3).map(step_of)  # one draw and not three, since a test makes thousands
STUB = st.fixed_dictionaries(
    {"tokens_per_chunk": st.integers(1, 3), "tail": st.integers(0, 3), "capacity": st.integers(1, 4)}
)


@dataclass
class Clients:
    """Calls with what they have received."""

    wanted: dict[str, Call] = field(default_factory=dict)
    received: dict[str, list[TokenChunk]] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    def begin(self, w: World, which: int) -> None:
        name = f"call {len(self.wanted)}"
        wanted = call(name, [which, 5, 6], 20 + 40 * which, key=str(which % 4), seed=which)
        self.wanted[name], self.received[name] = wanted, []

        async def client() -> None:
            async with aclosing(w.calls.stream(wanted)) as chunks:
                async for chunk in chunks:
                    self.received[name].append(chunk)
                    await settle(which % 3)  # some read slowly

        self.tasks[name] = asyncio.create_task(client())


async def perform(w: World, clients: Clients, step: Step) -> None:
    """Performs the step if the replica's state allows it."""
    name = REPLICAS[step.which % len(REPLICAS)]
    state = {replica.replica_id: replica.state for replica in w.fleet.view}[name]
    match step.what, state:
        case "keep" | "abort", "serving":
            await w.fleet.pause([name], PauseMode(step.what))
        case "resume", "paused":
            await w.fleet.resume([name])
        case "sync", "serving" | "paused" | "stale":
            await update_weights(w, name, PauseMode.KEEP if step.which % 2 else PauseMode.ABORT)
        case "release", "serving" | "paused" | "stale":
            await w.fleet.release([name])
        case "reclaim", "released":
            await w.fleet.reclaim([name])
        case "kill", s if s != DEAD:
            await w.kill(name)
        case "start", "dead":
            await w.start(name, version=None)
            await w.stubs[name].pause(PauseMode.ABORT)
        case "cancel", _ if clients.tasks:
            list(clients.tasks.values())[step.which % len(clients.tasks)].cancel()
        case "call", _:
            clients.begin(w, step.which)
    w.check()
    assert all(replica.load == 0 for replica in w.fleet.view if replica.state in (DEAD, RELEASED, STALE))


async def update_weights(w: World, name: str, mode: PauseMode) -> None:
    """One replica gets newer weights while the others keep theirs."""
    if {replica.replica_id: replica.state for replica in w.fleet.view}[name] is SERVING:
        await w.fleet.pause([name], mode)
    w.fleet.commit(w.fleet.committed + 1)
    if mode is PauseMode.KEEP:
        w.fleet.expect(REPLICAS)  # whose turn comes within the schedule, or at its end
    await w.sync([name], w.fleet.committed)


async def finish(w: World) -> None:
    """Makes every replica serve."""
    for replica in w.fleet.view:
        name = replica.replica_id
        if replica.state is DEAD:
            await w.start(name, version=None)
        elif replica.state is PAUSED:
            await w.fleet.resume([name])
        elif replica.state is RELEASED:
            await w.fleet.reclaim([name])
    for replica in w.fleet.view:
        if replica.state is STALE:
            await update_weights(w, replica.replica_id, PauseMode.KEEP)
    assert all(replica.state is SERVING for replica in w.fleet.view)
    for replica in w.fleet.view:  # as after every commit, those that have not had their turn
        if replica.outdated:
            await w.fleet.pause([replica.replica_id], PauseMode.KEEP)
            await w.sync([replica.replica_id], w.fleet.committed)


async def run_schedule(over_wire: bool, stubs: list[dict[str, int]], steps: list[Step]) -> None:
    async with world(over_wire=over_wire) as w:
        for name, stub in zip(REPLICAS, stubs, strict=True):
            await w.start(name, **stub)
        clients = Clients()
        for which in range(4):
            clients.begin(w, which)
        for step in steps:
            await settle(step.turns)
            await perform(w, clients, step)
        await finish(w)
        outcomes = await asyncio.wait_for(asyncio.gather(*clients.tasks.values(), return_exceptions=True), 60)
        committed = w.fleet.committed
        for (name, wanted), outcome in zip(clients.wanted.items(), outcomes, strict=True):
            assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
            chunks = clients.received[name]
            (check_whole if outcome is None else check_prefix)(wanted, chunks)
            assert all(0 <= chunk.version <= committed for chunk in chunks)
        metrics = w.calls.metrics()
        cancelled = sum(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        assert metrics["calls/length"] + metrics["calls/cancelled"] == metrics["calls/begun"]
        assert metrics["calls/length"] >= len(clients.wanted) - cancelled and metrics["calls/failed"] == 0


@settings(max_examples=300, deadline=None)
@given(stubs=st.lists(STUB, min_size=3, max_size=3), steps=st.lists(STEP, min_size=10, max_size=60))
def test_calls_survive_any_schedule(stubs: list[dict[str, int]], steps: list[Step]) -> None:
    asyncio.run(run_schedule(False, stubs, steps))


@pytest.mark.parametrize("schedules", [120])
def test_calls_survive_any_schedule_over_tcp(schedules: int) -> None:
    @settings(max_examples=schedules, deadline=None)
    @given(stubs=st.lists(STUB, min_size=3, max_size=3), steps=st.lists(STEP, min_size=10, max_size=60))
    def survive(stubs: list[dict[str, int]], steps: list[Step]) -> None:
        asyncio.run(run_schedule(True, stubs, steps))

    survive()
