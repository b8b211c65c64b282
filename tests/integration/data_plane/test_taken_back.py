"""A replica that was given up, and replies again, is taken back: it serves after its next weight update."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from support.local_plane import LocalDataPlane, ReplicaServer

from seamless_verl.data_plane import connections, lost_replicas
from seamless_verl.data_plane.actor import sum_metrics
from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.rollout.observation import CacheUse
from seamless_verl.rollout.replica import DEAD, SERVING, STALE, ReplicaState
from seamless_verl.rollout.restarts import LossReason
from seamless_verl.tools.bench.stub_engine import StubEngine
from seamless_verl.transport import EngineServer, serve_engine

pytestmark = pytest.mark.integration
NAMES, TOKEN = ("replica-0", "replica-1"), "the replicas'"
FIRST = NAMES[0]
LATE_S = 0.5


def listen(name: str, port: int = 0) -> Any:
    return serve_engine(StubEngine(name), "127.0.0.1", port, token=TOKEN, replica_id=name)


@asynccontextmanager
async def data_plane(**settings: Any) -> AsyncIterator[tuple[LocalDataPlane, EngineServer, ReplicaServer]]:
    """A data plane with two replicas that serve version 1; with it the first one's listener and server."""
    plane = LocalDataPlane(PlaneSettings("local", TOKEN, **settings))
    listeners, servers = [await listen(name) for name in NAMES], [ReplicaServer(CacheUse(10, 4, 1)) for _ in NAMES]
    await plane.start()
    for name, listener, server in zip(NAMES, listeners, servers, strict=True):
        await plane.attach(name, "127.0.0.1", listener.port, server)
    await plane.execute("commit", 1)
    await plane.execute("update_weights", NAMES, 1, [])
    assert states(plane) == [SERVING, SERVING]
    yield plane, listeners[0], servers[0]
    await plane.stop()
    for listener in listeners:
        await listener.close()


def states(plane: LocalDataPlane) -> list[ReplicaState]:
    return [view.state for view in plane.fleet.view]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 a replica's state has no event
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("late", ["pause", "update_weights"])
async def test_a_late_replica_is_taken_back_when_it_replies(late: str) -> None:
    async with data_plane(transition_s=LATE_S) as (plane, _, server):
        replies, in_time = asyncio.Event(), getattr(server, late)
        setattr(server, late, SimpleNamespace(remote=lambda *_: replies.wait()))
        await plane.execute(late, [FIRST], *([1, []] if late == "update_weights" else []))
        assert states(plane) == [DEAD, SERVING]
        metrics, loss = await plane.metrics(), (await plane.given_up())[FIRST]
        assert loss.reason is LossReason.LATE and "seamless.watchdog.transition_s" in loss.detail
        assert (metrics["fleet/given_up/late"], metrics["fleet/taken_back"]) == (1, 0)
        setattr(server, late, in_time)
        replies.set()
        await until(lambda: states(plane)[0] is STALE)
        assert await plane.given_up() == {} and (await plane.metrics())["fleet/taken_back"] == 1
        await plane.execute("resume", [FIRST])
        assert states(plane) == [STALE, SERVING], "its weights are not known"
        await plane.execute("update_weights", [FIRST], 1, [])
        assert states(plane) == [SERVING, SERVING]
        plane.check_integrity()


async def late_once(plane: LocalDataPlane, server: ReplicaServer, *command: Any) -> None:
    """The command comes too late for the first replica, and is then done."""
    replies, in_time = asyncio.Event(), getattr(server, command[0])
    setattr(server, command[0], SimpleNamespace(remote=lambda *_: replies.wait()))
    await plane.execute(*command)
    setattr(server, command[0], in_time)
    replies.set()
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "late command"))


async def test_a_replica_that_is_late_again_before_it_serves_is_not_taken_back() -> None:
    """Each commit would wait for it as long as it may take."""
    async with data_plane(transition_s=LATE_S) as (plane, _, server):
        await late_once(plane, server, "pause", [FIRST])
        await until(lambda: states(plane)[0] is STALE)
        await late_once(plane, server, "update_weights", [FIRST], 1, [])
        assert states(plane)[0] is DEAD and FIRST in await plane.given_up()
        assert (await plane.metrics())["fleet/taken_back"] == 1


async def test_a_replica_that_served_meanwhile_is_taken_back_each_time() -> None:
    async with data_plane(transition_s=LATE_S) as (plane, _, server):
        for times in (1, 2):
            await late_once(plane, server, "pause", [FIRST])
            await until(lambda: states(plane)[0] is STALE)
            assert (await plane.metrics())["fleet/taken_back"] == times
            await plane.execute("resume", [FIRST])
            await plane.execute("update_weights", [FIRST], 1, [])
            assert states(plane)[0] is SERVING


async def test_the_trainer_is_told_once_of_one_that_waits_for_weights() -> None:
    async with data_plane(transition_s=LATE_S) as (plane, _, server):
        assert await plane.taken_back() == []
        await late_once(plane, server, "pause", [FIRST])
        await until(lambda: states(plane)[0] is STALE)
        assert await plane.taken_back() == [FIRST]
        assert await plane.taken_back() == []


@pytest.mark.parametrize("mirror", [False, True])
async def test_a_late_replica_that_another_server_will_replace_is_not_taken_back(mirror: bool) -> None:
    """The trainer starts what the first data plane gave up; the others have to see to themselves."""
    async with data_plane(transition_s=LATE_S, restarts=True) as (plane, _, server):
        plane.lost.settings = replace(plane.settings, mirror=mirror)
        await late_once(plane, server, "pause", [FIRST])
        if mirror:
            await until(lambda: states(plane)[0] is STALE)
        else:
            assert states(plane)[0] is DEAD and FIRST in await plane.given_up()


async def test_an_unreachable_replica_is_taken_back_when_it_can_be_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lost_replicas, "RECONNECT_S", 0.1)
    monkeypatch.setattr(lost_replicas, "RETURN_S", 0.1)
    async with data_plane() as (plane, listener, _):
        port = listener.port
        await listener.close()
        plane.fleet.lost(FIRST, "the network failed")
        await until(lambda: FIRST in plane.lost.given_up)
        assert (await plane.metrics())["fleet/given_up/unreachable"] == 1
        again = await listen(FIRST, port)
        await until(lambda: states(plane)[0] is STALE)
        await plane.execute("update_weights", [FIRST], 1, [])
        assert states(plane) == [SERVING, SERVING] and not plane.lost.given_up
        await again.close()


async def test_a_server_that_is_unavailable_for_a_moment_while_it_is_paused_is_not_given_up() -> None:
    async with data_plane() as (plane, _, server):
        reply, errors = server.reply, [ray.exceptions.ActorUnavailableError("the network failed", None)]

        async def older() -> tuple[int, None]:
            return 0, None

        async def pause(mode: str) -> Any:
            if errors:
                raise errors.pop()
            return await reply(mode)

        server.status, server.pause = SimpleNamespace(remote=older), SimpleNamespace(remote=pause)
        plane.fleet.lost(FIRST, "the network failed")
        await until(lambda: not plane.lost.unconnected)
        assert states(plane) == [STALE, SERVING] and not errors and not plane.lost.given_up
        await plane.execute("update_weights", [FIRST], 1, [])
        assert states(plane) == [SERVING, SERVING]


async def test_a_server_that_hangs_while_it_is_connected_to_again_holds_no_command_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lost_replicas, "RECONNECT_S", 0.1)
    monkeypatch.setattr(lost_replicas, "RETURN_S", 0.1)
    async with data_plane(transition_s=LATE_S) as (plane, _, server):
        asked: list[asyncio.Event] = []

        async def hang() -> None:
            asked.append(asyncio.Event())
            await asked[-1].wait()

        server.status = SimpleNamespace(remote=hang)
        plane.fleet.lost(FIRST, "the network failed")
        await asyncio.wait_for(plane.execute("commit", 2), 60)
        loss = (await plane.given_up())[FIRST]
        assert loss.reason is LossReason.UNREACHABLE and "has not replied" in loss.detail
        assert 0 < loss.served_s < 60, "it is counted until it was lost"
        await until(lambda: len(asked) > 3)  # by the looks for its return
        assert FIRST in plane.lost.given_up and not plane.lost.unconnected


async def test_a_replica_that_hangs_between_two_commands_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls continue elsewhere, and it is taken back when it replies."""
    monkeypatch.setattr(connections, "PROBE_S", 0.05)
    async with data_plane(transition_s=LATE_S) as (plane, _, server):
        replies, in_time = asyncio.Event(), server.cache_use

        async def late() -> CacheUse:
            await replies.wait()
            return CacheUse()

        server.cache_use = SimpleNamespace(remote=late)
        await until(lambda: states(plane) == [DEAD, SERVING])
        assert (await plane.given_up())[FIRST].reason is LossReason.LATE
        server.cache_use = in_time
        replies.set()
        await until(lambda: states(plane) == [STALE, SERVING])
        assert await plane.taken_back() == [FIRST]


async def test_what_the_engines_count_of_their_caches_is_in_the_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PROBE_S", 0.05)
    async with data_plane() as (plane, _, _):
        wanted = {"cache/prompt_tokens": 20.0, "cache/cached_tokens": 8.0, "cache/preempted": 2.0}
        metrics = await plane.metrics()
        while {name: metrics[name] for name in wanted} != wanted:
            await asyncio.sleep(0.01)
            metrics = await plane.metrics()
        assert {name: sum_metrics([metrics, metrics])[name] for name in wanted} == wanted, "the same engines"
