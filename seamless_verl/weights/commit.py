"""Commits a version of the weights: staged while the replicas generate, then loaded into a few of them at a time.

The trainer stages the weights once in the memory of each host, and goes on. The replicas load them meanwhile: each
pauses only for its load; its calls freeze in the engine and continue with the new weights.

Owned state: the committed version with the place where it is staged, and the loads of it that are open.

Invariants:
- The staged memory is written only while no load is open: `__call__` and `lend` wait for the open ones first, and both
  are called by the trainer's thread alone.
- A version is staged before it is committed, and committed before a replica loads it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from verl.single_controller.ray import RayWorkerGroup

from seamless_verl.data_plane.client import DataPlaneClient, PlacedReplica, living_replies
from seamless_verl.weights.loads import BackgroundLoads, load_rounds
from seamless_verl.weights.staging import StagedWeights, one_per_host
from seamless_verl.weights.transfer import Transfer

logger = logging.getLogger(__name__)
Staged = list[StagedWeights]  # one for each host that has the version
ONE_HOST = ""


@dataclass
class CommitTimes:
    """What one commit took, in seconds; the loads' part is complete when all of them have ended."""

    waited_s: float = 0.0
    """for loads of the version before"""
    stage_s: float = 0.0
    """until the weights were in the memory of every host"""
    trainer_s: float = 0.0
    """from the call until the trainer went on"""
    load_s: float = 0.0
    """from there until the last replica had loaded"""
    pauses_s: list[float] = field(default_factory=list)
    """for which each replica that loaded staged weights paused; those that had released their memory are not counted,
    since they have not generated for longer"""
    not_loaded: int = 0
    """replicas that could not load, and are STALE or DEAD"""

    @property
    def total_s(self) -> float:
        return self.trainer_s - self.waited_s + self.load_s

    def own_metrics(self) -> dict[str, float]:
        """Known when the trainer goes on."""
        return {"stage_s": self.stage_s, "waited_s": self.waited_s, "trainer_s": self.trainer_s}

    def load_metrics(self) -> dict[str, float]:
        """Known when all loads have ended. `standstill_share` is the mean share of the commit for which a replica
        paused, `trainer_share` that for which the trainer waited."""
        named = {"load_s": self.load_s, "standstill_max_s": max(self.pauses_s, default=0.0)}
        named["not_loaded"] = float(self.not_loaded)
        if self.total_s > 0:
            named["trainer_share"] = 1 - self.load_s / self.total_s
        if self.pauses_s:
            named["standstill_share"] = sum(self.pauses_s) / (len(self.pauses_s) * self.total_s)
        return named


@dataclass
class WeightCommit:
    """Commits versions of the trainer's weights.

    Args:
        client: the data plane client.
        trainers: the workers that have the weights.
        replicas: all replicas of the job.
        transfer: to the hosts of replicas on devices of their own; None if there are none.
        at_once: how many replicas of a host load together.
        released: replicas on the trainer's devices release their memory while training computes.
        syncing: records in the ledger that these devices load.
        hosts: the host of each replica, by its id; without them all are on one.
    """

    client: DataPlaneClient
    trainers: RayWorkerGroup
    replicas: Sequence[PlacedReplica]
    transfer: Transfer | None
    at_once: int = 1
    released: bool = False
    syncing: Callable[[Sequence[str]], AbstractContextManager[None]] = lambda devices: nullcontext()
    hosts: Mapping[str, str] = field(default_factory=dict)
    committed: tuple[int, Staged] | None = None  # the version, and where it is staged until the next one is
    loads: BackgroundLoads | None = None  # of the committed version
    times: CommitTimes = field(default_factory=CommitTimes)  # of the committed version

    def __call__(self, version: int) -> dict[str, Any]:
        """Commits `version`, and starts its loads; returns metrics, of the loads those of the version before.

        Raises:
            WeightsNotLoadedError: a load of the version before has failed.
            ReplicaLostError: no replica served after the loads of the version before.
        """
        began = time.monotonic()
        self.wait()
        earlier, self.times = self.times, CommitTimes(waited_s=time.monotonic() - began)
        staged, metrics = self.stage(version)
        self.times.stage_s = time.monotonic() - began - self.times.waited_s
        execute, checked = self.client.actor.execute, self.client.actor.checked_metrics
        _, of_planes = ray.get([execute.remote("commit", version), checked.remote(loading=True)])
        self.committed, metrics = (version, staged), metrics | of_planes
        self.times.trainer_s = time.monotonic() - began
        self.loads = BackgroundLoads(version, self.rounds(), partial(self.load, version, staged), self.check)
        named = self.times.own_metrics() | (earlier.load_metrics() if earlier.load_s else {})
        return metrics | {f"seamless/commit/{name}": value for name, value in named.items()}

    def wait(self, ids: Collection[str] | None = None) -> None:
        """Returns when the open loads into these replicas, by default into all, have ended; raises what they raised."""
        if self.loads is not None:
            self.loads.wait(ids)

    def raise_failed(self) -> None:
        """Raises what `wait` would raise, if it is known by now; any thread may call it."""
        if (loads := self.loads) is not None:
            loads.raise_failed()

    def wait_for_devices(self) -> None:
        """Before training takes its devices: returns when no replica loads on them."""
        self.wait([replica.replica_id for replica in self.replicas if replica.shares_device])

    def stage(self, version: int) -> tuple[Staged, dict[str, Any]]:
        """Stages the weights in the memory of each host that has a replica; returns where, and metrics."""
        staged = one_per_host(self.trainers.stage_weights(version))
        sent, metrics = self.transfer.stage(version, staged) if self.transfer else ([], {})
        return [*staged, *sent], metrics

    def rounds(self) -> list[list[str]]:
        """Replicas that load together: all that released their memory, then `at_once` of the others on each host.

        Those on the trainer's devices come first, since training waits for them, and for no other.
        """
        sharing = [replica for replica in self.replicas if replica.shares_device]
        others = [replica for replica in self.replicas if not replica.shares_device]
        if self.released and sharing:
            return [[replica.replica_id for replica in sharing], *self._rounds(others)]
        return [*self._rounds(sharing), *self._rounds(others)]

    def _rounds(self, replicas: Sequence[PlacedReplica]) -> list[list[str]]:
        by_host: dict[str, list[str]] = {}
        for replica in replicas:
            by_host.setdefault(self.hosts.get(replica.replica_id, ONE_HOST), []).append(replica.replica_id)
        return load_rounds(list(by_host.values()), self.at_once)

    def has_released(self, replica: PlacedReplica) -> bool:
        """Whether the replica's memory is released while training computes."""
        return self.released and replica.shares_device

    def load(self, version: int, staged: Staged, ids: Sequence[str]) -> None:
        """Loads into the replicas of one round; not in the trainer's thread."""
        began = time.monotonic()
        replicas = [replica for replica in self.replicas if replica.replica_id in ids]
        released = self.has_released(replicas[0])
        if released:
            with self.syncing([device for replica in replicas for device in replica.devices]):
                loaded = self.load_released(ids, version, staged)
        else:
            loaded = list(self.client.execute("update_weights", ids, version, staged))
        self.times.load_s += time.monotonic() - began
        if not released:
            self.times.pauses_s += self.pauses_s(loaded)
        if failed := [name for name in ids if name not in loaded]:
            logger.warning("%s did not load version %d, and will not serve it", ", ".join(failed), version)
            self.times.not_loaded += len(failed)

    def check(self) -> None:
        """Raises ReplicaLostError if no replica serves."""
        ray.get(self.client.actor.checked_metrics.remote())

    def lend(self, ids: Sequence[str]) -> list[str]:
        """Loads the committed weights again into replicas that had released them; returns those that then serve.

        The weights are still staged, so that neither the trainer nor a commit is waited for, but open loads are.
        """
        assert self.committed is not None, "nothing is committed yet"
        self.wait()
        version, staged = self.committed
        return self.load_released(ids, version, staged)

    def load_started(self, ids: Sequence[str]) -> list[str]:
        """Loads the committed weights into replicas that have none of them yet; returns those that then serve.

        The weights are still staged, and open loads are waited for.

        Raises:
            ReplicaLostError: some could not load, and none serves.
        """
        assert self.committed is not None, "nothing is committed yet"
        self.wait()
        version, staged = self.committed
        loaded = list(self.client.execute("update_weights", ids, version, staged))
        if failed := [name for name in ids if name not in loaded]:
            logger.warning("%s did not load version %d, and waits for the next one", ", ".join(failed), version)
            self.check()
        return loaded

    def load_released(self, ids: Sequence[str], version: int, staged: Staged) -> list[str]:
        """Takes back the memory of these replicas, and loads staged weights; returns those that then serve."""
        self.trainers.free_cached_memory()
        self.client.execute("reclaim_memory", ids)
        return list(self.client.execute("update_weights", ids, version, staged))

    def pauses_s(self, loaded: Sequence[str]) -> list[float]:
        """Seconds for which each of these replicas paused."""
        servers = [replica.replica.server_handle for replica in self.replicas if replica.replica_id in loaded]
        return list(living_replies([server.last_pause_s.remote() for server in servers]))
