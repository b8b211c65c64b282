"""How a version of the weights is committed: staged beside the replicas while they generate, then loaded into a
few of them at a time, while the others go on.

A replica stands still for one load from its host's memory; what the trainer staged there all replicas on its devices
map. Calls are frozen in the engine meanwhile and go on under the new weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray
from verl.single_controller.ray import RayWorkerGroup

from seamless_verl.data_plane.client import PlacedReplica, living_replies
from seamless_verl.weights.staging import StagedWeights, one_of_each_host
from seamless_verl.weights.transfer import Transfer

Staged = dict[bool, list[StagedWeights]]


@dataclass
class WeightCommit:
    """`at_once` replicas stand still together; `transfer` reaches those on devices of their own. With `released`
    those on the trainer's devices have put their memory away, and take the weights straight from the engine."""

    plane: Any
    trainers: RayWorkerGroup
    replicas: Sequence[PlacedReplica]
    transfer: Transfer | None
    at_once: int = 1
    released: bool = False
    syncing: Callable[[Sequence[str]], AbstractContextManager[None]] = lambda devices: nullcontext()

    def __call__(self, version: int) -> dict[str, Any]:
        """Commit `version`; returns metrics, times in seconds.

        Raises:
            ReplicaLostError: no replica serves afterwards.
        """
        began = time.monotonic()
        staged, metrics = self.stage(version)
        loading = time.monotonic()
        ray.get(self.plane.commit.remote(version))
        loaded = [name for some in self.rounds() for name in self.load(some, version, staged)]
        ended = time.monotonic()
        metrics |= costs(self.stood_still(loaded), loading - began, ended - loading)
        return metrics | ray.get(self.plane.settle.remote())

    def stage(self, version: int) -> tuple[Staged, dict[str, Any]]:
        """Where the weights are, for replicas that share the trainer's devices and for the others; and metrics."""
        here = list[StagedWeights]()
        if self.transfer is not None or not self.released:
            here = one_of_each_host(self.trainers.stage_weights(version))
        there, metrics = self.transfer.stage(version) if self.transfer else ([], {})
        return {True: here, False: there}, metrics

    def rounds(self) -> list[list[PlacedReplica]]:
        """Who is loaded together: all that come back from the trainer, then a few of the others at a time."""
        back = [one for one in self.replicas if self.returns(one)]
        others = [one for one in self.replicas if not self.returns(one)]
        few = [others[begin : begin + self.at_once] for begin in range(0, len(others), self.at_once)]
        return [back, *few] if back else few

    def returns(self, one: PlacedReplica) -> bool:
        """Whether its memory was away."""
        return self.released and one.shares_device

    def load(self, some: Sequence[PlacedReplica], version: int, staged: Staged) -> list[str]:
        """Load into these replicas; those that loaded what was staged. One that cannot is left STALE or DEAD."""
        if self.returns(some[0]):
            with self.syncing([device for one in some for device in one.devices]):
                self.load_back([one.replica_id for one in some], version)
            return []
        loaded = list[str]()
        for shares, weights in staged.items():
            if ids := [one.replica_id for one in some if one.shares_device is shares]:
                loaded += ray.get(self.plane.refit.remote(ids, version, weights))
        return loaded

    def load_back(self, ids: Sequence[str], version: int) -> None:
        """Into those whose memory was away, straight from the trainer's engine, as verl does it."""
        ray.get(self.plane.returned.remote(ids))
        if not (standing := ray.get(self.plane.begin_sync.remote(ids))):
            return
        try:
            ray.get(list(self.trainers.update_weights(global_steps=version, mode="naive")))
        except ray.exceptions.RayError as error:  # these replicas' trouble; the others serve on
            ray.get(self.plane.sync_failed.remote(standing, str(error)))
        else:
            ray.get(self.plane.synced.remote(standing, version))

    def stood_still(self, loaded: Sequence[str]) -> list[float]:
        """Seconds that these did not generate."""
        there = [one.replica.server_handle for one in self.replicas if one.replica_id in loaded]
        asked = [server.stood_still.remote() for server in there]
        return list(living_replies(asked))


def costs(standstills: Sequence[float], stage_s: float, load_s: float) -> dict[str, float]:
    """Metrics of a commit.

    `standstill_share` is the part of it in which those that loaded what was staged did not generate;
    those that come back from the trainer have not generated for longer.
    """
    named: dict[str, float] = {"stage_s": stage_s, "load_s": load_s, "standstill_max_s": max(standstills, default=0.0)}
    if standstills:
        named["standstill_share"] = sum(standstills) / (len(standstills) * (stage_s + load_s))
    return {f"seamless/commit/{name}": value for name, value in named.items()}
