"""The end of a plane's callers, which comes before its own: none of their calls or sessions is open any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray
from support.ends import RecoveringPlane, Replica, cluster, started
from support.plane import Plane, plane

from seamless_verl.agent_loops.loops import SessionAgentLoop
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.outcome import AgentOutcome
from seamless_verl.agents.settings import LoopSettings
from seamless_verl.data_plane.client import await_reply
from seamless_verl.journal import JournalReader, Stage

pytestmark = [pytest.mark.integration, pytest.mark.slowest(5)]


async def running(plane: Plane, number: int) -> dict[str, float]:
    """The plane's metrics, once so many calls run."""
    while (metrics := await plane.first.metrics.remote())["calls/running"] != number:
        pass  # bounded by the caller's timeout
    return dict(metrics)


async def cancelled(call: Any, plane: Plane, *, cancels: bool) -> None:
    """Somebody who waited for the call, and was told not to while it ran."""
    waiting = asyncio.ensure_future(await_reply(call, cancels=cancels))
    await running(plane, 1)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=30)
    assert waiting.cancelled()


def test_whoever_waits_no_longer_has_no_call_open(nano: Path, tmp_path: Path) -> None:
    with plane(nano / "model", tmp_path, replicas=1, delay_s=0.05) as one:
        one.commit(1)
        asyncio.run(asyncio.wait_for(waited(one), 120))
        asyncio.run(asyncio.wait_for(opened(one, tmp_path), 120))
        one.client.stop()


async def waited(one: Plane) -> None:
    await cancelled(one.first.generate.remote("long", [1, 2], {"max_tokens": 1000}), one, cancels=True)
    metrics = await running(one, 0)
    assert (metrics["calls/cancelled"], metrics["calls/begun"]) == (1, 1) and metrics["calls/tokens"] < 1000
    await cancelled(one.first.generate.remote("short", [1, 2], {"max_tokens": 20}), one, cancels=False)
    metrics = await one.first.metrics.remote()
    assert metrics["calls/running"] == 0 and metrics["calls/length"] == 1, "it was waited for"
    assert await one.servers[0].running.remote() == 0


class Waits(SessionAgentLoop):
    """Runs an agent that never ends."""

    def __init__(self, plane: Plane) -> None:
        self.config, self.rollout_config = plane.config, plane.config.actor_rollout_ref.rollout
        self.settings = LoopSettings(failure_reward=None)
        self.begun = asyncio.Event()

    async def run_agent(self, task: Mapping[str, Any], endpoint: Endpoint) -> AgentOutcome:
        self.begun.set()
        return await asyncio.Future()


async def stopped(running: Coroutine[Any, Any, Any], begun: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.ensure_future(running)
    await begun
    task.cancel()
    await asyncio.wait([task], timeout=30)
    assert task.cancelled()


async def opened(plane: Plane, folder: Path) -> None:
    """Sessions whose agents are stopped: one at work, and one whose session is being opened."""
    working, opening = Waits(plane), Waits(plane)
    await stopped(working.run({}, uid="working", session_id=0), working.begun.wait())
    await stopped(opening.run({}, uid="opening", session_id=0), asyncio.sleep(0))  # it comes as far as its call
    assert not opening.begun.is_set()
    found = {one.uid: (one.reason, one.stage) for one in JournalReader(folder / "trajectories.sqlite").sessions()}
    assert found == dict.fromkeys(("working", "opening"), ("abandoned", Stage.HANDED))


def test_a_call_that_is_cut_takes_nothing_with_it_that_it_started() -> None:
    with cluster():
        replica, recovering = started(Replica), started(RecoveringPlane)
        call = recovering.generate.remote(replica)

        async def cancels() -> None:
            await stopped(await_reply(call, cancels=True), asked(replica))

        asyncio.run(cancels())
        ray.get(replica.release.remote())
        assert ray.get(recovering.recovered.remote(), timeout=60) == "alive"


async def asked(replica: Any) -> None:
    await asyncio.wait_for(replica.when_asked.remote(), 60)
