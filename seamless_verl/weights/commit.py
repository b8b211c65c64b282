"""Commits a version of the weights: staged while the replicas generate, then loaded into a few of them at a time.

The trainer stages the weights once in the memory of each host. A replica pauses only for the load from there; its calls
freeze in the engine meanwhile and continue with the new weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray
from verl.single_controller.ray import RayWorkerGroup

from seamless_verl.data_plane.client import DataPlaneClient, PlacedReplica, living_replies
from seamless_verl.weights.staging import StagedWeights, one_per_host
from seamless_verl.weights.transfer import Transfer

Staged = dict[bool, list[StagedWeights]]  # by whether replicas share the trainer's devices


@dataclass
class WeightCommit:
    """Commits versions of the trainer's weights.

    Args:
        client: the data plane client.
        trainers: the workers that have the weights.
        replicas: all replicas of the job.
        transfer: to the hosts of replicas on devices of their own; None if there are none.
        at_once: how many replicas pause together.
        released: replicas on the trainer's devices have released their memory, and load directly from the trainer's
            engine.
        syncing: records in the ledger that these devices load.
    """

    client: DataPlaneClient
    trainers: RayWorkerGroup
    replicas: Sequence[PlacedReplica]
    transfer: Transfer | None
    at_once: int = 1
    released: bool = False
    syncing: Callable[[Sequence[str]], AbstractContextManager[None]] = lambda devices: nullcontext()

    def __call__(self, version: int) -> dict[str, Any]:
        """Commits `version`; returns metrics, times in seconds.

        Raises:
            ReplicaLostError: no replica serves afterwards.
        """
        began = time.monotonic()
        staged, metrics = self.stage(version)
        staged_at = time.monotonic()
        self.client.execute("commit", version)
        loaded = [name for replicas in self.rounds() for name in self.load(replicas, version, staged)]
        ended = time.monotonic()
        metrics |= commit_metrics(self.pauses_s(loaded), staged_at - began, ended - staged_at)
        return metrics | ray.get(self.client.actor.checked_metrics.remote())

    def stage(self, version: int) -> tuple[Staged, dict[str, Any]]:
        """Stages the weights for replicas on the trainer's devices and for the others; returns where, and metrics."""
        shared = list[StagedWeights]()
        if self.transfer is not None or not self.released:
            shared = one_per_host(self.trainers.stage_weights(version))
        sent, metrics = self.transfer.stage(version) if self.transfer else ([], {})
        return {True: shared, False: sent}, metrics

    def rounds(self) -> list[list[PlacedReplica]]:
        """Groups of replicas that load together: all that released their memory, then `at_once` of the others."""
        released = [replica for replica in self.replicas if self.has_released(replica)]
        others = [replica for replica in self.replicas if not self.has_released(replica)]
        groups = [others[begin : begin + self.at_once] for begin in range(0, len(others), self.at_once)]
        return [released, *groups] if released else groups

    def has_released(self, replica: PlacedReplica) -> bool:
        """Whether the replica's memory is released while training computes."""
        return self.released and replica.shares_device

    def load(self, replicas: Sequence[PlacedReplica], version: int, staged: Staged) -> list[str]:
        """Loads into these replicas; returns those that loaded staged weights. The others are STALE or DEAD."""
        if self.has_released(replicas[0]):
            with self.syncing([device for replica in replicas for device in replica.devices]):
                self.load_from_trainer([replica.replica_id for replica in replicas], version)
            return []
        loaded = list[str]()
        for shares, weights in staged.items():
            if ids := [replica.replica_id for replica in replicas if replica.shares_device is shares]:
                loaded += self.client.execute("update_weights", ids, version, weights)
        return loaded

    def load_from_trainer(self, ids: Sequence[str], version: int) -> None:
        """Loads directly from the trainer's engine, as verl does, into replicas that had released their memory."""
        self.client.execute("reclaim_memory", ids)
        if not (paused := self.client.execute("begin_sync", ids)):
            return
        try:
            ray.get(list(self.trainers.update_weights(global_steps=version, mode="naive")))
        except ray.exceptions.RayError as error:  # only these replicas fail; the others continue to serve
            self.client.execute("fail_sync", paused, str(error))
        else:
            self.client.execute("end_sync", paused, version)

    def pauses_s(self, loaded: Sequence[str]) -> list[float]:
        """Seconds for which each of these replicas paused."""
        servers = [replica.replica.server_handle for replica in self.replicas if replica.replica_id in loaded]
        return list(living_replies([server.last_pause_s.remote() for server in servers]))


def commit_metrics(pauses_s: Sequence[float], stage_s: float, load_s: float) -> dict[str, float]:
    """Metrics of a commit.

    `standstill_share` is the mean share of the commit for which a replica that loaded staged weights paused. Replicas
    that had released their memory are not counted: they have not generated for longer.
    """
    named: dict[str, float] = {"stage_s": stage_s, "load_s": load_s, "standstill_max_s": max(pauses_s, default=0.0)}
    if pauses_s:
        named["standstill_share"] = sum(pauses_s) / (len(pauses_s) * (stage_s + load_s))
    return {f"seamless/commit/{name}": value for name, value in named.items()}
