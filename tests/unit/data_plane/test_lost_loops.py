"""What agent loops left is cleared up while leases of the same prompts end by themselves."""

from __future__ import annotations

import asyncio
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
from support.runner_sessions import MemorySessions, RunnersAndLoops

from seamless_verl.data_plane.lost_sessions import end_left


class LoopSessions(MemorySessions):
    """With what `end_left` asks of sessions, none of which had ended."""

    def __init__(self, *steps: int) -> None:
        super().__init__(chain(steps, repeat(steps[-1])))
        self.journal.stages_of = lambda uids: {}
        self.accounts = SimpleNamespace(unacknowledged={})

    async def settled(self) -> None:
        """Nothing was asked for."""

    def awaited(self) -> dict[str, str]:
        return dict.fromkeys(self.closed, "u")


async def test_a_lease_that_expires_meanwhile_is_dropped_once() -> None:
    world = RunnersAndLoops(LoopSessions(5))
    await world.tasks.start(restarted=False)
    world.submit("t", max_attempts=1)
    world.lease()
    await world.settle()
    (session_id,) = world.sessions.closed
    await world.advance(11.0)
    while not (being_dropped := not world.tasks.lease_sessions.task_of(session_id)):
        await world.settle(1)
    assert being_dropped and session_id in world.sessions.closed and world.tasks.has(session_id)
    await end_left(world.sessions, world.tasks, ["u"])  # type: ignore[arg-type]
    await world.settle(200)
    assert not world.sessions.closed and not world.tasks.has(session_id)
    await world.stop()


async def test_a_session_that_ends_while_another_is_dropped_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    world = RunnersAndLoops(LoopSessions(0))
    await world.tasks.start(restarted=False)
    for name in ("first", "second"):
        world.sessions.metadata[name], world.sessions.closed[name] = {}, asyncio.Event()
    drop = world.sessions.drop

    async def drop_both(session_id: str, *why: Any) -> None:
        await drop(session_id, *why)
        world.sessions.closed.pop("second", None)  # its own loop's request, which was on its way

    monkeypatch.setattr(world.sessions, "drop", drop_both)
    await end_left(world.sessions, world.tasks, ["u"])  # type: ignore[arg-type]
    assert not world.sessions.closed
    await world.stop()
