"""A Ray cluster of several raylets on this host, which differ in their labels, for runs that join it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from seamless_verl.platform.detect import PRESTART
from support.paths import DATA

STORE_BYTES = 100 << 20


@dataclass
class Nodes:
    """The nodes by their names; `cluster` owns them."""

    cluster: Cluster
    nodes: dict[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, name: str, *, devices: int = 0, cpus: int = 16, labels: Mapping[str, str] | None = None) -> str:
        """Starts a node, the first one as the head; returns its id when it has joined."""
        self.nodes[name] = self.cluster.add_node(
            num_cpus=cpus,
            num_gpus=devices,
            labels=dict(labels or {}),
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
        )
        return str(self.nodes[name].node_id)

    def actors(self, name: str) -> set[str]:
        """The names of the classes whose actors live on this node."""
        table = self.cluster.global_state.actor_table(None, None, "ALIVE")
        here = self.nodes[name].node_id
        return {actor["ActorClassName"] for actor in table.values() if actor["Address"]["NodeID"] == here}

    def drain(self, name: str) -> None:
        """Announces that the node will be removed, as an autoscaler does of a machine that is taken away."""
        deadline = int((time.time() + 600) * 1000)
        client = GcsClient(address=self.address)
        taken_away = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        accepted, problem = client.drain_node(str(self.nodes[name].node_id), taken_away, "a test", deadline)
        assert accepted, problem

    def kill(self, name: str) -> list[psutil.Process]:
        """Kills a raylet by signal 9: Ray has to find out that the node is gone. Returns the processes it had.

        They end when its process id is free, which takes that somebody waits for it.
        """
        (info,) = self.nodes[name].all_processes["raylet"]
        ending = psutil.Process(info.process.pid).children(recursive=True)
        info.process.kill()
        info.process.wait()
        return ending


@contextmanager
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """A cluster without nodes. Its processes have the environment of `ray start`, and not that of a run."""
    monkeypatch.setenv("PYTHONPATH", str(DATA))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(PRESTART, "0")  # of workers that lack a run's environment
    for name in list(os.environ):
        if name.startswith("SEAMLESS_") or name == "VERL_PLATFORM":
            monkeypatch.delenv(name)
    made = Cluster()
    try:
        yield Nodes(made)
    finally:
        made.shutdown()
