"""The sessions of one prompt: each has one outcome, none ends another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.agents.group import Group, Run
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus
from seamless_verl.errors import ConfigError

S = AgentStatus


async def yields(times: int) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


def runs(plan: Sequence[tuple[str, int]], at_once: list[int] | None = None) -> Run:
    """Session i does what plan[i] says, so many turns of the loop later."""
    now = 0

    async def run(index: int) -> AgentOutcome:
        nonlocal now
        now += 1
        if at_once is not None:
            at_once.append(now)
        try:
            what, turns = plan[index]
            await yields(turns)
            if what == "raise":
                raise ValueError("boom")
            if what == "cancel":
                raise asyncio.CancelledError
            if what == "wait":
                await asyncio.Event().wait()
            return AgentOutcome(AgentStatus(what), reward=float(index))
        finally:
            await yields(2)
            now -= 1

    return run


ENDS = {"finished": S.FINISHED, "failed": S.FAILED, "timed_out": S.TIMED_OUT, "raise": S.FAILED, "cancel": S.CANCELLED}
PLAN = st.lists(st.tuples(st.sampled_from(list(ENDS)), st.integers(0, 5)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(PLAN, st.integers(1, 4))
def test_every_session_has_its_own_outcome_and_slots_bound_them(plan: list[tuple[str, int]], slots: int) -> None:
    at_once: list[int] = []

    async def main() -> tuple[AgentOutcome, ...]:
        return await Group(runs(plan, at_once), len(plan), slots=asyncio.Semaphore(slots)).run()

    outcomes = asyncio.run(main())
    assert [outcome.status for outcome in outcomes] == [ENDS[what] for what, _ in plan]
    assert max(at_once) == min(slots, len(plan)) or max(at_once) < slots
    assert all(outcome.reward == i for i, outcome in enumerate(outcomes) if outcome.status == S.FINISHED)


@settings(max_examples=100, deadline=None)
@given(PLAN, st.integers(1, 4), st.integers(0, 25), st.booleans(), st.booleans())
def test_a_cancellation_at_any_moment_leaves_one_outcome_each(
    plan: list[tuple[str, int]], slots: int, moment: int, by_method: bool, twice: bool
) -> None:
    async def main() -> tuple[Group, bool]:
        group = Group(runs([*plan, ("wait", 0)]), len(plan) + 1, slots=asyncio.Semaphore(slots))
        task = asyncio.create_task(group.run())
        await yields(moment)
        for _ in range(1 + twice):
            group.cancel() if by_method else task.cancel()
            await yields(1)
        await asyncio.wait({task})
        return group, task.cancelled()

    group, raised = asyncio.run(asyncio.wait_for(main(), 20))
    if by_method or group.outcomes:
        group.check_integrity()
        assert group.outcomes[len(plan)].status == S.CANCELLED
    else:
        assert moment == 0  # cancelled before its first step: nothing was admitted
    assert raised is not by_method


def test_a_failed_session_tells_its_traceback() -> None:
    async def main() -> tuple[AgentOutcome, ...]:
        return await Group(runs([("raise", 0), ("finished", 3)]), 2, slots=asyncio.Semaphore(2)).run()

    failed, finished = asyncio.run(main())
    assert "ValueError: boom" in failed.error and finished.status == S.FINISHED


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(ConfigError, match="sessions=0"):
        Group(runs([]), 0, slots=asyncio.Semaphore(1))
