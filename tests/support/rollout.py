"""Fleets of stub engines, directly or over loopback, and calls on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from seamless_verl.rollout.call import Call, Calls
from seamless_verl.rollout.engine import Engine
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.tools.bench.stub_engine import StubEngine, stub_logprob, stub_tokens
from seamless_verl.trajectory.records import Finish, TokenChunk, tokens
from seamless_verl.transport import EngineServer, RemoteEngine, serve_engine

TOKEN = "a shared secret"


async def settle(turns: int = 20) -> None:
    """Runs everything that can run without a new event."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0)  # it waits for sockets; the test's timeout bounds it


def call(name: str = "c", prompt: list[int] | None = None, max_tokens: int = 40, **more: Any) -> Call:
    key, group = more.pop("key", ""), more.pop("group", "")
    return Call(name, tokens(prompt or [1, 2, 3]), {"max_tokens": max_tokens, **more}, key, group=group)


@dataclass
class World:
    """A fleet, its engines and its calls."""

    fleet: Fleet
    calls: Calls
    over_wire: bool = False
    stubs: dict[str, StubEngine] = field(default_factory=dict)
    every_stub: list[StubEngine] = field(default_factory=list)
    servers: dict[str, EngineServer] = field(default_factory=dict)

    async def start(self, name: str, *, version: int | None = 0, capacity: int = 4, **stub: Any) -> StubEngine:
        engine = StubEngine(name, version=version or 0, **stub)
        self.stubs[name] = engine
        self.every_stub.append(engine)
        used = await self._connected(name, engine) if self.over_wire else engine
        self.fleet.add(name, engine=used, control=engine, capacity=capacity, version=version)
        return engine

    async def _connected(self, name: str, engine: StubEngine) -> Engine:
        server = self.servers[name] = await serve_engine(engine, "127.0.0.1", 0, token=TOKEN, replica_id=name)
        remote: RemoteEngine

        def on_lost(reason: str) -> None:
            self.fleet.lost(name, reason, engine=remote)

        remote = await RemoteEngine.connect(
            "127.0.0.1", server.port, token=TOKEN, replica_id=name, on_lost=on_lost, timeout_s=30
        )
        return remote

    async def kill(self, name: str) -> None:
        """Kills a replica: its engine stops and, over TCP, its connection breaks."""
        self.stubs[name].kill()
        if self.over_wire:
            await self.servers.pop(name).close()
        self.fleet.lost(name, "killed")

    async def sync(self, ids: list[str], version: int) -> list[str]:
        begun = await self.fleet.begin_sync(ids)
        for name in begun:
            self.stubs[name].version = version
        return await self.fleet.end_sync(begun, version)

    def check(self) -> None:
        self.fleet.check_integrity()
        self.calls.check_integrity()


@asynccontextmanager
async def world(*, over_wire: bool = False, **settings: Any) -> AsyncIterator[World]:
    """A world; at its end no task, request or slot may be left."""
    before = asyncio.all_tasks()
    fleet = Fleet()
    made = World(fleet, Calls(fleet, **settings), over_wire)
    yield made
    made.check()
    await settle()
    view = fleet.view
    for name in list(fleet):
        await fleet.remove(name)
    for server in made.servers.values():
        await server.close()
    await settle()
    assert sum(replica.load for replica in view) == 0
    assert [engine.running for engine in made.every_stub] == [0] * len(made.every_stub)
    assert asyncio.all_tasks() == before


async def run(calls: Calls, wanted: Call) -> list[TokenChunk]:
    async with aclosing(calls.stream(wanted)) as chunks:
        return [chunk async for chunk in chunks]


def ids_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


def check_whole(wanted: Call, chunks: list[TokenChunk]) -> None:
    """Checks that the call ended once, at its budget, and as if it had never been interrupted."""
    number = wanted.sampling["max_tokens"]
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [Finish.LENGTH]
    check_prefix(wanted, chunks)
    assert len(ids_of(chunks)) == number


def check_prefix(wanted: Call, chunks: list[TokenChunk]) -> None:
    """Checks that the chunks are a beginning of the uninterrupted call, each token with its weight version."""
    found, position = ids_of(chunks), len(wanted.prompt_ids)
    assert found == stub_tokens(wanted.prompt_ids, len(found))
    for chunk in chunks:
        assert chunk.logprobs.tolist() == [
            stub_logprob(chunk.version, place) for place in range(position, position + len(chunk.ids))
        ]
        position += len(chunk.ids)
