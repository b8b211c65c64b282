"""When the callers of a data plane end, none of their calls or sessions stays open."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from support.ends import RecoveringPlane, Replica, cluster, started
from support.plane import Plane, plane

from seamless_verl.agent_loops.loops import LocalAgentLoop
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.outcome import AgentOutcome
from seamless_verl.agents.own_time import PausedSeconds
from seamless_verl.agents.settings import LoopSettings
from seamless_verl.data_plane.client import await_reply
from seamless_verl.journal import JournalReader, Stage

pytestmark = [pytest.mark.integration, pytest.mark.slowest(5)]


async def running(plane: Plane, number: int) -> dict[str, float]:
    """The data plane's metrics, once `number` calls run."""
    while (metrics := await plane.first.metrics.remote())["calls/running"] != number:
        pass  # bounded by the caller's timeout
    return dict(metrics)


async def cancelled(call: Any, plane: Plane, *, cancels: bool) -> None:
    """Waits for the call, and is cancelled while it runs."""
    waiting = asyncio.ensure_future(await_reply(call, cancels=cancels))
    await running(plane, 1)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=30)
    assert waiting.cancelled()


def test_a_cancelled_caller_leaves_no_call_open(nano: Path, tmp_path: Path) -> None:
    with plane(nano / "model", tmp_path, replicas=1, delay_s=0.05) as started_plane:
        started_plane.commit(1)
        asyncio.run(asyncio.wait_for(cancelled_calls(started_plane), 120))
        asyncio.run(asyncio.wait_for(stopped_sessions(started_plane, tmp_path), 120))
        started_plane.client.stop()


async def cancelled_calls(plane: Plane) -> None:
    await cancelled(plane.first.generate.remote("long", [1, 2], {"max_tokens": 1000}), plane, cancels=True)
    metrics = await running(plane, 0)
    assert (metrics["calls/cancelled"], metrics["calls/begun"]) == (1, 1) and metrics["calls/tokens"] < 1000
    assert metrics["calls/validation_tokens"] == 0
    await cancelled(plane.first.generate.remote("short", [1, 2], {"max_tokens": 100}), plane, cancels=False)
    metrics = await plane.first.metrics.remote()
    assert metrics["calls/running"] == 0 and metrics["calls/length"] == 1, "the call did not end"
    await plane.first.generate.remote("validating", [1, 2], {"max_tokens": 20}, "", True)
    assert (await plane.first.metrics.remote())["calls/validation_tokens"] == 20
    assert await plane.servers[0].running.remote() == 0


class EndlessAgentLoop(LocalAgentLoop):
    """Runs an agent that never ends."""

    def __init__(self, plane: Plane) -> None:
        self.config, self.rollout_config = plane.config, plane.config.actor_rollout_ref.rollout
        self.settings = LoopSettings(failure_reward=None)
        self.begun = asyncio.Event()

    async def run_agent(self, task: Mapping[str, Any], endpoint: Endpoint, paused: PausedSeconds) -> AgentOutcome:
        self.begun.set()
        return await asyncio.Future()


async def stopped(running: Coroutine[Any, Any, Any], begun: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.ensure_future(running)
    await begun
    task.cancel()
    await asyncio.wait([task], timeout=30)
    assert task.cancelled()


async def stopped_sessions(plane: Plane, folder: Path) -> None:
    """Stops two sessions: one whose agent runs, and one that is being opened."""
    working, opening = EndlessAgentLoop(plane), EndlessAgentLoop(plane)
    await stopped(working.run({}, uid="working", session_id=0), working.begun.wait())
    await stopped(opening.run({}, uid="opening", session_id=0), asyncio.sleep(0))  # it has sent its call
    assert not opening.begun.is_set()
    found = {row.uid: (row.reason, row.stage) for row in JournalReader(folder / "trajectories.sqlite").sessions()}
    assert found == dict.fromkeys(("working", "opening"), ("abandoned", Stage.HANDED))


def test_a_cancelled_call_cancels_no_task_that_it_started() -> None:
    with cluster():
        replica, recovering = started(Replica), started(RecoveringPlane)
        call = recovering.generate.remote(replica)

        async def cancels() -> None:
            await stopped(await_reply(call, cancels=True), requested(replica))

        asyncio.run(cancels())
        ray.get(replica.release.remote())
        assert ray.get(recovering.recovered.remote(), timeout=60) == "alive"


async def requested(replica: Any) -> None:
    await asyncio.wait_for(replica.when_asked.remote(), 60)
