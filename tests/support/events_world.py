"""A live run: real engines behind the product's servers, and a plane in an actor that Ray starts again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from seamless_verl.data_plane.client import CONCURRENCY, RESTARTED_FOREVER
from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.platform.forkserver.launcher import set_worker_command
from support.events_plane import WatchedPlane
from support.events_server import Server
from support.paths import child_environment

NAMES = ("replica-0", "replica-1", "replica-2")
TOKEN, CAPACITY = "the door's", 64


@dataclass
class World:
    """The plane, the replicas and what is known of them."""

    model: Path
    plane: Any
    host: str
    servers: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, dict[str, psutil.Process]] = field(default_factory=dict)
    down: set[str] = field(default_factory=set)
    revivals: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, name: str) -> None:
        """A replica that is attached; it is STALE."""
        cores = sorted(os.sched_getaffinity(0))
        rank = NAMES.index(name)
        made = ray.remote(Server).options(num_cpus=0)
        server = made.remote(rank, str(self.model), cores[rank % len(cores)], self.host)
        await server.launch.remote()
        self.processes[name] = {what: psutil.Process(pid) for what, pid in (await server.processes.remote()).items()}
        host, port = await server.listen.remote(TOKEN, [name])
        await self.plane.attach.remote(name, host, port, server)
        self.servers[name] = server

    async def kill(self, *processes: psutil.Process) -> None:
        """Kill -9; returns when they are gone, as some may have been before."""
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for process in processes:
            await asyncio.to_thread(process.wait)

    async def end(self) -> None:
        """In order, as a run ends."""
        await self.plane.stop.remote()
        await asyncio.gather(*(server.end.remote() for server in self.servers.values()))


@contextmanager
def cluster() -> Iterator[None]:
    """Ray, with workers that have imported everything."""
    executable = '"$SEAMLESS_PYTHON" -IS "$SEAMLESS_LAUNCHER"'
    with pytest.MonkeyPatch.context() as patch:
        named = dict[str, str]()
        set_worker_command(named)
        for name, value in named.items():
            patch.setenv(name, value)
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=128 << 20,
            runtime_env={"env_vars": child_environment(), "py_executable": executable},
        )
        try:
            yield
        finally:
            ray.shutdown()


@asynccontextmanager
async def world(model: Path) -> AsyncIterator[World]:
    """All replicas are attached; nobody serves yet."""
    settings = PlaneSettings("events", TOKEN, CAPACITY)
    options: dict[str, Any] = {"num_cpus": 0, **RESTARTED_FOREVER, "name": "events", "max_concurrency": CONCURRENCY}
    made = World(model, ray.remote(WatchedPlane).options(**options).remote(settings), ray.util.get_node_ip_address())
    try:
        await made.plane.start.remote()
        await asyncio.gather(*map(made.start, NAMES))
        yield made
        await made.end()
    finally:
        await made.kill(*(process for one in made.processes.values() for process in one.values()))
