"""Runners' tasks while everything happens at once: no request fails, and a kill at any event can be continued."""

from __future__ import annotations

import asyncio
import time
from itertools import chain, cycle, repeat
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rollout import until
from support.runner_sessions import MemorySessions, RunnersAndLoops

from seamless_verl.data_plane.earlier_sessions import SAMPLE
from seamless_verl.data_plane.lease_book import DONE, LEASED, QUEUED, LeaseTerms, TaskOrder
from seamless_verl.data_plane.runner_tasks import TaskPolls
from seamless_verl.journal import RUN, SessionSummary, Stage
from seamless_verl.runtime import process

ACTION = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 3)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("lease"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["complete", "return", "give back", "heartbeat"]), st.integers(0, 9)),
    st.tuples(st.just("advance"), st.sampled_from([4, 11])),
    st.tuples(st.just("turns"), st.integers(1, 20)),
)


async def act(world: RunnersAndLoops, action: str, number: int) -> None:
    match action:
        case "submit":
            claim_s = None if number == 1 else 12.0
            world.submit(f"t{len(world.loops)}", max_attempts=number, claim_s=claim_s)
        case "cancel" if world.loops:
            world.loops[number % len(world.loops)].cancel()
        case "lease":
            for _ in range(number):
                world.lease()
        case "complete" | "return" | "give back" | "heartbeat":
            world.end(number, action)
        case "advance":
            await world.advance(float(number))
        case "turns":
            await world.settle(number)


async def check_continuation(world: RunnersAndLoops) -> None:
    """A process that was killed after any event can be continued: each task has its newest lease or none."""
    kept = world.sessions.kept
    for count, open_sessions in enumerate(kept.open_sessions, 1):
        sessions = MemorySessions(repeat(0), tuple(kept.events[:count]), **open_sessions)
        later = RunnersAndLoops(sessions)
        await later.tasks.start(restarted=True)
        later.tasks.leases.check_integrity()
        leased = {event.detail["task"]: event.subject for event in kept.events[:count] if event.kind == "leased"}
        held = {task.task_id: task.lease_id for task in later.tasks.leases}
        assert held.items() <= leased.items()
        assert set(sessions.closed) == {later.tasks.lease_sessions.of(lease_id) for lease_id in held.values()}
        await later.advance(11.0)
        await later.settle()
        await later.stop()


@settings(max_examples=60, deadline=None)
@given(st.lists(ACTION, min_size=5, max_size=30), st.lists(st.integers(0, 6), min_size=1, max_size=12))
def test_whatever_happens_at_once_no_request_fails_and_a_kill_can_be_continued(
    actions: list[tuple[str, int]], steps: list[int]
) -> None:
    async def scenario() -> None:
        world = RunnersAndLoops(MemorySessions(cycle(steps)))
        await world.tasks.start(restarted=False)
        for action, number in actions:
            await act(world, action, number)
        await world.settle(200)
        world.tasks.leases.check_integrity()
        working = [task for task in world.tasks.leases if task.state in (LEASED, DONE)]
        assert set(world.sessions.closed) == {world.tasks.lease_sessions.of(task.lease_id) for task in working}
        await world.stop()
        await check_continuation(world)

    asyncio.run(asyncio.wait_for(scenario(), 60))


async def world_of(*steps: int, tasks: int = 1, **terms: Any) -> RunnersAndLoops:
    """With so many tasks, each leased; the last of the steps is repeated."""
    world = RunnersAndLoops(MemorySessions(chain(steps, repeat(steps[-1]))))
    await world.tasks.start(restarted=False)
    for number in range(tasks):
        world.submit(f"t{number}", **terms)
        world.lease()
    await world.settle()
    assert len(world.leases) == tasks
    return world


def kinds(world: RunnersAndLoops) -> list[str]:
    return [f"{event.kind} {event.detail.get('task', '')}".strip() for event in world.sessions.kept.events]


async def test_all_leases_of_a_dead_runner_end_on_record_before_one_of_their_tasks_is_leased_again() -> None:
    world = await world_of(3, tasks=3)
    for _ in range(3):
        world.lease()
    await world.settle()
    await world.advance(11.0)
    await world.settle(200)
    assert kinds(world)[-6:] == [*(f"lost t{n}" for n in range(3)), *(f"leased t{n}" for n in range(3))]
    await world.stop()


async def test_a_task_that_is_withdrawn_while_its_lease_expires_ends_quietly() -> None:
    world = await world_of(5, tasks=2)
    await world.advance(11.0)
    await world.settle(2)
    for loop in world.loops:
        loop.cancel()
    await world.settle(200)
    assert not list(world.tasks.leases) and not world.sessions.closed
    await world.stop()


async def test_a_task_that_is_withdrawn_while_its_result_is_recorded_is_refused_to_its_runner() -> None:
    world = await world_of(1, 1, 1, 30, 1)  # the result's append is slow
    world.end(0, "complete")
    await world.settle(2)
    world.loops[0].cancel()
    await world.settle(200)
    assert world.codes == ["lease_ended"] and not list(world.tasks.leases) and not world.sessions.closed
    assert kinds(world)[-2:] == ["done t0", "withdrawn t0"]
    await world.stop()


async def test_a_task_that_is_withdrawn_while_its_session_is_opened_leaves_none_open() -> None:
    world = await world_of(1, tasks=0)
    world.sessions.steps = chain([30], repeat(1))  # the opening is slow
    loop = world.submit("t0")
    world.lease()
    await world.settle(12)
    assert [task.state for task in world.tasks.leases] == [LEASED]
    loop.cancel()
    await world.settle(200)
    assert not world.sessions.closed and not world.leases and "leased t0" not in kinds(world)
    await world.stop()


async def test_a_restored_task_is_leased_again_only_when_its_agent_loop_has_asked_for_it() -> None:
    first = await world_of(1)
    later = RunnersAndLoops(MemorySessions(repeat(6), tuple(first.sessions.kept.events), **first.sessions.metadata))
    await later.tasks.start(restarted=True)
    later.leases = list(first.leases)
    later.end(0, "give back")
    await later.settle(3)
    later.lease()
    await later.settle(200)
    assert not later.codes and not list(later.tasks.leases) and not later.sessions.closed
    later.submit("t0")
    await later.settle(200)
    assert len(later.leases) == 2, "the runner that waited has it"
    await later.stop()
    await first.stop()


async def test_of_a_task_with_two_leases_on_record_the_newest_is_continued() -> None:
    """As an earlier release left it, when it was killed between a new lease and the end of the old one."""
    first = await world_of(1)
    await first.advance(11.0)
    first.lease()
    await first.settle()
    events = [event for event in first.sessions.kept.events if event.kind != "lost"]
    later = RunnersAndLoops(MemorySessions(repeat(1), tuple(events), **first.sessions.metadata))
    await later.tasks.start(restarted=True)
    assert [task.lease_id for task in later.tasks.leases] == [first.leases[1]]
    assert list(later.sessions.closed) == ["s1"]
    await later.stop()
    await first.stop()


async def test_a_runner_returns_a_lease_by_the_id_it_chose_and_that_costs_no_attempt() -> None:
    world = await world_of(1, tasks=0)
    world.submit("t0", max_attempts=1)
    world.lease("a" * 32)
    await world.settle()
    world.give_back("a" * 32)
    await world.settle()
    assert [(task.state, task.attempts) for task in world.tasks.leases] == [(QUEUED, 0)] and not world.codes
    world.lease("b" * 32)
    await world.settle()
    assert world.leases == ["a" * 32, "b" * 32]
    await world.stop()


async def test_a_repeated_request_for_a_lease_ends_the_one_whose_reply_was_lost() -> None:
    world = await world_of(1, tasks=0)
    world.submit("t0", max_attempts=1)
    world.lease("a" * 32)
    await world.settle()
    world.lease("a" * 32)
    await world.settle()
    assert world.codes == ["lease_ended"]
    assert [(task.state, task.attempts) for task in world.tasks.leases] == [(QUEUED, 0)] and not world.sessions.closed
    await world.stop()


async def test_an_agent_loop_that_is_cancelled_twice_leaves_no_session_open() -> None:
    world = await world_of(1, 1, 1, 30, 1)  # the withdrawal's append is slow
    for _ in range(2):
        world.loops[0].cancel()
        await world.settle(2)
    await world.settle(200)
    assert not list(world.tasks.leases) and not world.sessions.closed
    await world.stop()


@pytest.mark.parametrize("cancelled", [1, 2])
async def test_a_runner_that_leaves_while_its_lease_is_given_back_leaves_no_session_open(cancelled: int) -> None:
    """It asked for the lease again, and then it asks no more."""
    world = await world_of(1, tasks=0)
    world.submit("t0")
    world.lease("a" * 32)
    await world.settle()
    world.sessions.steps = chain([30], repeat(1))  # the append of the give-back is slow
    world.lease("a" * 32)
    for _ in range(cancelled):
        await world.settle(3)
        world.requests[-1].cancel()
    await world.settle(200)
    assert [task.state for task in world.tasks.leases] == [QUEUED] and not world.sessions.closed
    await world.stop()


async def test_a_runner_that_leaves_while_its_first_lease_begins_leaves_no_session_open() -> None:
    world = await world_of(1, tasks=0)
    world.submit("t0")
    world.sessions.steps = chain([30], repeat(1))  # the opening of the session is slow
    world.lease()
    for _ in range(2):
        await world.settle(3)
        world.requests[-1].cancel()
    await world.settle(200)
    assert [task.state for task in world.tasks.leases] == [QUEUED] and not world.sessions.closed
    await world.stop()


async def test_an_agent_loop_that_is_cancelled_while_too_old_a_lease_is_withdrawn_leaves_no_session_open() -> None:
    first = await world_of(1)
    later = RunnersAndLoops(MemorySessions(repeat(1), tuple(first.sessions.kept.events), **first.sessions.metadata))
    settings = {"metadata": {RUN: "run", SAMPLE: "0"}}
    session = SessionSummary("s0", "u", settings, Stage.OPEN, tokens=7, oldest=0, newest=0)
    later.tasks.kept_open = {"s0": session}
    later.sessions.earlier.count = lambda *_: None
    await later.tasks.start(restarted=True)
    later.sessions.steps = chain([30], repeat(1))  # the append of the withdrawal is slow
    opening = {"uid": "u", "metadata": {"session": "0", "step": 5}}
    loop = asyncio.create_task(later.tasks.run(TaskOrder("t9", {}, opening, 60.0, LeaseTerms("a", 10.0, None, 1))))
    later.loops.append(loop)
    await later.settle(3)
    loop.cancel()
    await later.settle(200)
    assert not list(later.tasks.leases) and not later.sessions.closed
    await later.stop()
    await first.stop()


async def test_leases_do_not_end_while_their_data_plane_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when it is stopped, or swapped out: signs of life wait for it meanwhile."""
    monkeypatch.setattr(process, "LATE_S", 0.2)
    monkeypatch.setattr(process, "BEAT_S", 0.05)
    world = RunnersAndLoops(MemorySessions(repeat(1)), own_clock=False)
    await world.tasks.start(restarted=False)
    world.submit("t0", lease_s=0.5)
    world.lease()
    await world.settle()
    time.sleep(1.0)  # noqa: ASYNC251 - the whole process stands still
    await world.settle()
    world.end(0, "heartbeat")
    await world.settle()
    assert not world.codes and [task.state for task in world.tasks.leases] == [LEASED]
    await until(lambda: world.tasks.leases["t0"].state is not LEASED)  # its runner is silent from now on
    await world.stop()


async def test_a_task_wakes_one_that_can_take_it_and_another_if_that_one_leaves() -> None:
    polls, woken = TaskPolls(), list[str]()

    async def poll(name: str, agents: set[str]) -> None:
        await polls.wait(agents)
        woken.append(name)

    tasks = [asyncio.create_task(poll(name, agents)) for name, agents in (("1", {"b"}), ("2", {"a"}), ("3", {"a"}))]
    await asyncio.sleep(0)
    polls.offer("a")
    tasks[1].cancel()  # it was woken, and has not run yet
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait([tasks[2]])
    assert woken == ["3"] and len(polls) == 1
    polls.offer("c")
    assert len(polls) == 1
    polls.wake_all()
    await tasks[0]
    assert woken == ["3", "1"] and len(polls) == 0
