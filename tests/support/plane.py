"""A job's data plane as the trainer starts it, over replicas whose engines are stubs: real actors, no model."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf

from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.data_plane.client import DataPlaneClient, PlacedReplica
from seamless_verl.rollout.engine import EngineRequest, PauseMode
from seamless_verl.rollout.observation import CacheUse
from seamless_verl.tools.bench.stub_engine import StubEngine
from seamless_verl.transport import EngineServer, serve_engine
from support.paths import child_environment

VOCABULARY = 128  # ASCII characters, none of which ends a turn


class StubServer:
    """A replica's server, as the data plane and the trainer see it."""

    def __init__(self, rank: int, delay_s: float) -> None:
        self.name, self.version = f"replica-{rank}", 0
        self.engine = StubEngine(self.name, delay_s=delay_s, vocabulary=VOCABULARY)
        self.paused: PauseMode | None = None
        self.engine_server: EngineServer

    async def listen(self, token: str, devices: Any, keep_kv: bool) -> tuple[str, int]:
        host = ray.util.get_node_ip_address()
        self.engine_server = await serve_engine(self.engine, host, 0, token=token, replica_id=self.name)
        return host, self.engine_server.port

    async def status(self) -> tuple[int, str | None]:
        return self.engine.version, None if self.paused is None else self.paused.value

    async def cache_use(self) -> CacheUse:
        return CacheUse()

    async def pause(self, mode: str) -> None:
        self.paused = PauseMode(mode)
        await self.engine.pause(self.paused)

    async def resume(self) -> None:
        await self.engine.resume()
        self.paused = None

    async def load(self, version: int) -> None:
        """Sets the version, as a load from the trainer does."""
        assert self.paused is not None or self.engine.version == 0, "loaded while it generates"
        self.engine.version = version

    async def update_weights(self, version: int, weights: Any) -> None:
        await self.pause(PauseMode.KEEP)
        self.engine.version = version
        await self.resume()

    async def drop_connections(self) -> None:
        """Breaks its connections, as a failing network does."""
        for connection in tuple(self.engine_server.connections):
            connection.abandon("the network failed")

    async def end(self) -> None:
        """As SeamlessServer: its engine ends."""
        self.engine.kill("ended")

    async def seen(self) -> list[EngineRequest]:
        """All requests so far."""
        return self.engine.seen

    async def running(self) -> int:
        return self.engine.running


class Caller:
    """An agent loop worker with calls of verl's own loops."""

    def begin(self, planes: list[Any]) -> None:
        """One of each of two prompts in each data plane; it does not wait for them."""
        self.calls = [
            plane.generate.remote(f"{group} {place}", [place, 2, 3], {"max_tokens": 1000}, group)
            for group in ("lost", "other")
            for place, plane in enumerate(planes)
        ]


class Plane:
    """A data plane with its replicas; a test calls its methods in the place of the trainer."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        shards: int,
        replicas: int,
        delay_s: float,
        restarts: int = 0,
        journal_gib: float = 4.0,
        enabled: bool = True,
    ) -> None:
        gateway = {"enabled": enabled, "shards": shards, "max_failed_groups": 3, "journal_gib": journal_gib}
        self.config: DictConfig = OmegaConf.create(
            {
                "actor_rollout_ref": {
                    "model": {"path": str(model)},
                    "rollout": {
                        "max_num_seqs": 64,
                        "max_model_len": 2048,
                        "prompt_length": 1024,
                        "response_length": 1024,
                        "dtype": "float32",
                    },
                },
                "trainer": {"default_local_dir": str(folder)},
                "seamless": {"gateway": gateway, "restarts": restarts},
            }
        )
        self.servers = [ray.remote(StubServer).options(num_cpus=0).remote(i, delay_s) for i in range(replicas)]
        self.names = [f"replica-{i}" for i in range(replicas)]
        seamless = SeamlessConfig.parse(self.config.seamless)
        self.gateway, self.client = seamless.gateway, DataPlaneClient(self.config, seamless)
        self.first = self.client.actor
        self.placed = [
            PlacedReplica(SimpleNamespace(server_handle=server, replica_rank=i), False, (f"rollout-{i}",))  # type: ignore[arg-type]
            for i, server in enumerate(self.servers)
        ]
        self.client.attach(self.placed, keep_kv=False)

    def commit(self, version: int) -> None:
        """One replica after the other, as WeightCommit does it."""
        ray.get(self.first.execute.remote("commit", version))
        for name in self.names:
            ray.get(self.first.execute.remote("update_weights", [name], version, []))

    def pids(self) -> list[int]:
        return ray.get([actor.__ray_call__.remote(process) for actor in self.client.actors])

    def kill(self, shard: int) -> None:
        """Kills the process of a shard; returns when it is gone."""
        pid = self.pids()[shard]
        os.kill(pid, signal.SIGKILL)
        while os.path.exists(f"/proc/{pid}") and state(pid) != "Z":
            time.sleep(0.01)  # bounded by the test's own timeout


def process(_: Any) -> int:
    return os.getpid()


def collect_garbage(_: Any) -> None:
    gc.collect()


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


@contextmanager
def plane(
    model: Path,
    folder: Path,
    *,
    shards: int = 1,
    replicas: int = 2,
    delay_s: float = 0.02,
    **more: Any,
) -> Iterator[Plane]:
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": child_environment()}, log_to_driver=True)
    try:
        yield Plane(model, folder, shards=shards, replicas=replicas, delay_s=delay_s, **more)
    finally:
        ray.shutdown()
