"""Commits a version of the weights: staged while the replicas generate, then loaded into a few of them at a time.

The trainer's workers stage the weights once in the memory of each host. Where a worker can do that in a thread
(`trainer/weight_export.py`), the trainer goes on at once: nothing changes the weights before its next optimizer step,
which the worker itself holds back until they are copied. Elsewhere the trainer waits until they are. The replicas load
them meanwhile: each pauses only for its load; its calls freeze in the engine and continue with the new weights.

Owned state: the commit that runs in the background (staging, committed, loading, done; or failed, which is final), and
the committed version with the place where it is staged. Each trainer worker owns its open copy
(`weights/background.py`), the data plane the version that may be served. What is to happen once the next version is
committed waits in `early` until its commit begins; a thread for which the trainer's waits may add to it.

Invariants:
- The staged memory is written only while no load is open: `__call__` and `load_again` wait for the open commit first,
  and both are called by the trainer's thread alone. So at most one commit is open.
- A version is staged before it is committed, and committed before a replica loads it, or a prompt of the next step
  begins (`when_committed`): it would begin on weights that are one version older than the staleness bound counts.
- Other hosts get the weights from the trainer's workers, which then do not compute: the trainer waits for that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from verl.single_controller.ray import RayWorkerGroup

from seamless_verl.data_plane.client import DataPlaneClient, PlacedReplica, living_replies
from seamless_verl.data_plane.server_calls import ServerCalls
from seamless_verl.weights.background import StagingBegun, StagingEnd
from seamless_verl.weights.commit_times import CommitTimes
from seamless_verl.weights.loads import BackgroundLoads, load_rounds
from seamless_verl.weights.staging import Report, StagedWeights, one_per_host
from seamless_verl.weights.transfer import Transfer

logger = logging.getLogger(__name__)
Staged = list[StagedWeights]  # one for each host that has the version
Begun = Report | StagingBegun  # a rank's reply: it has staged, or copies in the background
ONE_HOST = ""


@dataclass
class WeightCommit:
    """Commits versions of the trainer's weights.

    Args:
        client: the data plane client.
        trainers: the workers that have the weights.
        replicas: all replicas of the job.
        transfer: to the hosts of replicas on devices of their own; None if there are none.
        at_once: how many replicas of a host load together, while the others generate.
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
    begun: int | None = None  # the version of the last call
    loads: BackgroundLoads | None = None  # of the version that was committed last, or is
    early: list[Callable[[], None]] = field(default_factory=list)  # actions that wait for the next call's version
    times: CommitTimes = field(default_factory=CommitTimes)  # of the version that was committed last, or is

    def __call__(self, version: int) -> dict[str, Any]:
        """Commits `version`, in the background as far as it can be; returns metrics, those of the commit before.

        Raises:
            WeightsNotLoadedError: a load of the version before has failed.
            ReplicaLostError: no replica served after the loads of the version before.
            Exception: whatever ended the staging of the version before, or of this one where the trainer waits for it.
        """
        began = time.monotonic()
        self.wait()
        self.begun = version
        earlier, self.times = self.times, CommitTimes(waited_s=time.monotonic() - began)
        named = {"waited_s": self.times.waited_s} | (earlier.metrics() if earlier.load_s else {})
        of_planes = self.client.actor.checked_metrics.remote(loading=True)
        begun = self.trainers.stage_weights(version)
        commit, metrics = partial(self.commit_staged, version, begun), dict[str, Any]()
        if not self.goes_on(begun):
            commit, metrics = partial(dict), commit()
        metrics |= ray.get(of_planes)
        self.times.trainer_waited(self.times.began, for_loads=False)
        rounds = self.rounds(together=metrics.get("fleet/attached") == 0)
        self.loads = BackgroundLoads(version, rounds, partial(self.load, version), self.check, commit)
        early, self.early = self.early, []
        for action in early:
            self.loads.when_committed(action)
        return metrics | {f"seamless/commit/{name}": value for name, value in named.items()}

    def goes_on(self, begun: Sequence[Begun]) -> bool:
        """Whether the trainer computes while its workers stage: they do it in threads, and no other host waits."""
        hosts = {reply.host for reply in begun if isinstance(reply, StagingBegun)}
        return bool(hosts) and not (self.transfer and self.transfer.without(hosts))

    def commit_staged(self, version: int, begun: Sequence[Begun]) -> dict[str, Any]:
        """Commits `version`, once it is staged; returns metrics of the transfer."""
        staged, metrics = self.stage(version, begun)
        self.times.stage_s = time.monotonic() - self.times.began
        self.client.execute("commit", version)
        self.committed, self.times.committed = (version, staged), time.monotonic()
        return metrics

    def stage(self, version: int, begun: Sequence[Begun]) -> tuple[Staged, dict[str, Any]]:
        """Returns when the weights are in the memory of each host that has a replica: where, and metrics."""
        reports = list[Report](begun)
        if any(isinstance(reply, StagingBegun) for reply in begun):
            ends: list[StagingEnd] = ray.get(self.trainers.finish_staging())
            reports = [end.report for end in ends]
            self.times.held_s = max(end.held_s for end in ends)
        staged = one_per_host(reports)
        sent, metrics = self.transfer.stage(version, staged) if self.transfer else ([], {})
        return [*staged, *sent], metrics

    def wait(self, ids: Collection[str] | None = None) -> None:
        """Returns when the open loads into these replicas, by default into all, have ended; raises what they raised."""
        if self.loads is not None:
            since = time.monotonic()
            self.loads.wait(ids)
            self.times.trainer_waited(since, for_loads=True)

    def wait_committed(self) -> None:
        """Returns when the version is committed; raises what ended that."""
        if self.loads is not None:
            since = time.monotonic()
            self.loads.wait_committed()
            self.times.trainer_waited(since, for_loads=False)

    def when_committed(self, version: int, action: Callable[[], None]) -> None:
        """Has it called once this version is committed, now or then; see `BackgroundLoads.when_committed`.

        `version` is at most the next one that is committed. Called by the trainer's thread, or by one for which that
        waits. Raises what ended the open commit or its loads, if it is known by now.
        """
        if version > (self.begun or 0):
            self.raise_failed()
            self.early.append(action)
        elif self.loads is None:
            action()
        else:
            self.loads.when_committed(action)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts what the trainer waits for in the block as a wait for the commit, as far as that is open."""
        since = time.monotonic()
        yield
        self.times.trainer_waited(since, for_loads=False)

    def under_way(self) -> tuple[int, float] | None:
        """The version that is being staged, committed or loaded, and for how many seconds; any thread may call it."""
        version, loads, began = self.begun, self.loads, self.times.began
        if version is None or (loads is not None and loads.version == version and not loads.open):
            return None
        return version, time.monotonic() - began

    def raise_failed(self) -> None:
        """Raises what `wait` would raise, if it is known by now; any thread may call it."""
        if (loads := self.loads) is not None:
            loads.raise_failed()

    def wait_for_devices(self) -> None:
        """Before training takes its devices: returns when no replica loads on them."""
        self.wait([replica.replica_id for replica in self.replicas if replica.shares_device])

    def rounds(self, together: bool = False) -> list[list[str]]:
        """Replicas that load together: all that released their memory, then `at_once` of the others on each host.

        Those on the trainer's devices come first, since training waits for them, and for no other. With `together`, for
        when none has a call that it could continue while others load, these load at once, and then those.
        """
        sharing = [replica for replica in self.replicas if replica.shares_device]
        others = [replica for replica in self.replicas if not replica.shares_device]
        at_once = len(self.replicas) if together else self.at_once
        if self.released and sharing:
            return [[replica.replica_id for replica in sharing], *self._rounds(others, at_once)]
        return [*self._rounds(sharing, at_once), *self._rounds(others, at_once)]

    def _rounds(self, replicas: Sequence[PlacedReplica], at_once: int) -> list[list[str]]:
        by_host: dict[str, list[str]] = {}
        for replica in replicas:
            by_host.setdefault(self.hosts.get(replica.replica_id, ONE_HOST), []).append(replica.replica_id)
        return load_rounds(list(by_host.values()), at_once)

    def has_released(self, replica: PlacedReplica) -> bool:
        """Whether the replica's memory is released while training computes."""
        return self.released and replica.shares_device

    def load(self, version: int, ids: Sequence[str]) -> None:
        """Loads into the replicas of one round; not in the trainer's thread."""
        assert self.committed is not None and self.committed[0] == version, f"version {version} is not committed"
        began, staged = time.monotonic(), self.committed[1]
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

    def load_again(self, ids: Sequence[str]) -> list[str]:
        """Loads the committed weights again into replicas that had released them; returns those that then serve.

        The weights are still staged, so that neither the trainer nor a commit is waited for, but open loads are.
        """
        self.wait()
        assert self.committed is not None, "nothing is committed yet"
        version, staged = self.committed
        return self.load_released(ids, version, staged)

    def load_started(self, ids: Sequence[str]) -> list[str]:
        """Loads the committed weights into replicas that have none of them yet; returns those that then serve.

        The weights are still staged, and open loads are waited for. A host that is new, or has lost its copy, gets them
        first.

        Raises:
            ReplicaLostError: some could not load, and none serves.
        """
        self.wait()
        assert self.committed is not None, "nothing is committed yet"
        version, staged = self.committed
        if self.transfer is not None:
            sent, _ = self.transfer.stage(version, staged)
            staged = list({weights.host: weights for weights in [*staged, *sent]}.values())
            self.committed = version, staged
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
        servers = {one.replica_id: one.replica.server_handle for one in self.replicas if one.replica_id in loaded}
        return list(living_replies(ServerCalls("last_pause_s").call(servers).values()))
