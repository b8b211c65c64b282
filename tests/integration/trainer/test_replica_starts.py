"""Replicas that die are started again over real data planes: their calls go on, and they serve committed weights."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from support.plane import VOCABULARY, Plane, StubServer, plane, process

from seamless_verl.config.schema import WatchdogConfig
from seamless_verl.data_plane.client import PlacedReplica, plane_for
from seamless_verl.errors import PlaneFailedError
from seamless_verl.rollout.restarts import RestartStage
from seamless_verl.tools.bench.stub_engine import stub_tokens
from seamless_verl.trainer.replica_starts import ReplicaStarter, noticed_s
from seamless_verl.trainer.servers import end_actors

pytestmark = [pytest.mark.integration, pytest.mark.long]
LENGTH, LIMIT = 400, 2


class Servers:
    """Starts stubs in the place of SeamlessServers, as many as `failing` of them without success."""

    def __init__(self, plane: Plane, failing: int = 0) -> None:
        self.placed, self.failing, self.on_leaving_nodes = plane.placed, failing, set[str]()

    def start_again(self, placed: PlacedReplica) -> Any:
        end_actors([placed.replica.server_handle])
        if self.failing:
            self.failing -= 1
            raise ray.exceptions.RayError("no room on the device")
        rank = placed.replica.replica_rank
        server = ray.remote(StubServer).options(num_cpus=0).remote(rank, 0.02)
        return SimpleNamespace(replica_rank=rank, server_handle=server, servers=[server])

    def leaving(self) -> set[str]:
        return set(self.on_leaving_nodes)

    def leave(self, placed: PlacedReplica) -> None:
        end_actors([placed.replica.server_handle])
        self.on_leaving_nodes.discard(placed.replica_id)

    def missing_for(self, placed: PlacedReplica) -> str | None:
        return None

    def discard(self, placed: PlacedReplica, started: Any) -> None:
        end_actors(started.servers)

    def replace(self, placed: PlacedReplica, started: Any) -> None:
        placed.replica.server_handle = started.server_handle


def starter_of(plane: Plane, *, failing: int = 0, in_trainer: bool = False) -> ReplicaStarter:
    return ReplicaStarter(
        Servers(plane, failing),  # type: ignore[arg-type]
        plane.client,
        noticed_s=noticed_s(WatchdogConfig()),
        limit=LIMIT,
        keep_kv=False,
        must_wait=lambda placed: in_trainer,
        wait_committed=lambda: None,
        free_memory=lambda: None,
    )


def kill(server: Any) -> None:
    os.kill(ray.get(server.__ray_call__.remote(process)), signal.SIGKILL)


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def call(plane: Plane, number: int) -> Any:
    name = f"request-{number}"
    return plane_for(plane.config, name).generate.remote(name, [number, 2, 3], {"max_tokens": LENGTH})


def check_replies(calls: list[Any]) -> None:
    for number, reply in enumerate(ray.get(calls, timeout=120)):
        assert reply.ids == stub_tokens([number, 2, 3], LENGTH, VOCABULARY) and len(reply.versions) == LENGTH


def test_replicas_come_back_and_no_call_fails(nano: Path, tmp_path: Path) -> None:
    with plane(nano / "model", tmp_path, shards=2, restarts=LIMIT) as running:
        running.commit(1)
        starter = starter_of(running)
        starter.begin()
        calls = [call(running, number) for number in range(6)]
        await_that(lambda: sum(ray.get([server.running.remote() for server in running.servers])) == len(calls))
        for server in running.servers:  # with none left the calls wait
            kill(server)
        await_that(lambda: len(starter.started) == 2)
        loaded: list[str] = []

        def load(names: Any) -> None:
            loaded.extend(running.client.execute("update_weights", names, 1, []))

        starter.while_waiting(load)
        assert sorted(loaded) == running.names
        check_replies(calls)
        metrics = starter.metrics()
        assert (metrics["replicas/lost/died"], metrics["replicas/returned"]) == (2, 2)
        kill(running.placed[0].replica.server_handle)
        await_that(lambda: starter.restarts.stage("replica-0") is not RestartStage.SERVING)
        running.client.execute("commit", 2)
        running.client.execute("update_weights", ["replica-1"], 2, [])
        assert ray.get(running.first.checked_metrics.remote())["fleet/dead"] == 1
        starter.close()


def test_what_starts_between_computations_and_fails_is_abandoned(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("seamless_verl.rollout.restarts.FIRST_WAIT_S", 0.0)
    with plane(nano / "model", tmp_path, replicas=1, restarts=LIMIT) as running:
        running.commit(1)
        starter = starter_of(running, failing=LIMIT, in_trainer=True)
        kill(running.servers[0])

        def lost() -> bool:
            starter.look()
            return starter.restarts.stage("replica-0") is RestartStage.WAITING

        await_that(lost)
        waited = list[str]()
        starter.wait_committed = lambda: waited.append("staged")
        starter.free_memory = lambda: waited.append(f"free for start {len(waited) // 2}")
        for _ in range(LIMIT):
            starter.before_commit()
        assert waited == ["staged", "free for start 0", "staged", "free for start 1"], "nothing is copied at a start"
        assert starter.restarts.stage("replica-0") is RestartStage.ABANDONED
        with pytest.raises(PlaneFailedError, match="no replica is left"):
            ray.get(running.first.wait_for_groups.remote(0, 60.0), timeout=120)


def test_a_replica_whose_node_leaves_is_ended_first_if_another_one_serves(nano: Path, tmp_path: Path) -> None:
    with plane(nano / "model", tmp_path, restarts=LIMIT) as running:
        running.commit(1)
        starter, servers = starter_of(running), running.servers
        on_leaving_nodes: set[str] = starter.servers.on_leaving_nodes  # type: ignore[attr-defined]
        on_leaving_nodes.update(running.names)
        starter.drain()
        assert ray.get([server.running.remote() for server in servers]) == [0, 0], "none would serve"
        on_leaving_nodes.discard("replica-1")
        calls = [call(running, number) for number in range(4)]
        await_that(lambda: sum(ray.get([server.running.remote() for server in servers])) == len(calls))
        starter.begin()
        check_replies(calls)
        await_that(lambda: "replica-0" in starter.started)
        assert starter.restarts.stage("replica-1") is RestartStage.SERVING
        starter.close()
