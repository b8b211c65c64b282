"""Commits a version of the weights: staged while the replicas generate, then loaded into a few of them at a time.

Where a worker copies in a thread (`weights/background.py`), the trainer goes on at once: the worker itself holds its
next optimizer step back until the copy has ended. Elsewhere the trainer waits. Each replica pauses only for its load.

Invariants:
- The staged memory is written only while no load is open: `begin` and `load_again` wait for the open update first, and
  both are called by the trainer's thread alone. So at most one update is open.
- A version is staged before it is committed, and committed before a replica loads it, or a prompt of the next step
  begins (`then`): it would begin on weights that are one version older than the staleness bound counts.
- Other hosts get the weights from the trainer's workers, which then do not compute: the trainer waits for that.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from verl.single_controller.ray import RayWorkerGroup

from seamless_verl.weights.background import StagingBegun, StagingEnd
from seamless_verl.weights.seal import SealMode
from seamless_verl.weights.staging import Report, StagedWeights, one_per_host
from seamless_verl.weights.transfer import Transfer
from seamless_verl.weights.update import CommitTimes, Reach, WeightUpdate

logger = logging.getLogger(__name__)
Staged = list[StagedWeights]  # one for each host that has the version
Begun = Report | StagingBegun  # a rank's reply: it has staged, or copies in the background


@dataclass(kw_only=True)
class WeightCommit:
    """Commits versions of the trainer's weights.

    Args:
        execute: sends a command of the rollout manager; returns what `ray.get` gives its result for.
        metrics: asks for the fleet's metrics, `loading` or not, and returns what `ray.get` gives them for; raises
            there if no replica serves.
        pauses_s: for how many seconds each of these replicas paused for its last load.
        trainers: the workers that have the weights.
        sharing: the devices of each replica that shares its own with the trainer, by the replica's id.
        others: the other replicas.
        transfer: to the hosts of replicas on devices of their own; None if there are none.
        at_once: how many replicas of a host load together, while the others generate.
        released: replicas on the trainer's devices release their memory while training computes.
        syncing: records in the ledger that these devices load.
        hosts: the host of each replica, by its id; without them all are on one.
        seal: what of each version is sealed: `sample`, `full` or `off`.
    """

    execute: Callable[..., Any]
    metrics: Callable[[bool], Any]
    pauses_s: Callable[[Sequence[str]], list[float]]
    trainers: RayWorkerGroup
    sharing: Mapping[str, Sequence[str]]
    others: Sequence[str] = ()
    transfer: Transfer | None = None
    at_once: int = 1
    released: bool = False
    syncing: Callable[[Sequence[str]], AbstractContextManager[None]] = lambda devices: nullcontext()
    hosts: Mapping[str, str] = field(default_factory=dict)
    seal: SealMode = "sample"
    committed: tuple[int, Staged] | None = None  # the version, and where it is staged until the next one is
    begun: int | None = None  # the version of the last call
    update: WeightUpdate | None = None  # to the version that was committed last, or is
    times: CommitTimes = field(default_factory=CommitTimes)  # of that version

    def begin(self, version: int) -> dict[str, Any]:
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
        of_planes = self.metrics(True)
        begun = self.trainers.stage_weights(version, self.seal)
        metrics, commit = dict[str, Any](), {"commit": partial(self.commit, version, begun)}
        if not self.goes_on(begun):
            metrics, commit = self.commit(version, begun), {}
        metrics |= ray.get(of_planes)
        self.times.trainer_waited(self.times.began, for_loads=False)
        rounds = self.rounds(together=metrics.get("fleet/attached") == 0)
        self.update = WeightUpdate(version, rounds, partial(self.load, version), self.check, times=self.times, **commit)
        return metrics | {f"seamless/commit/{name}": value for name, value in named.items()}

    def goes_on(self, begun: Sequence[Begun]) -> bool:
        """Whether the trainer computes while its workers stage: they do it in threads, and no other host waits."""
        hosts = {reply.host for reply in begun if isinstance(reply, StagingBegun)}
        return bool(hosts) and not (self.transfer and self.transfer.without(hosts))

    def commit(self, version: int, begun: Sequence[Begun]) -> dict[str, Any]:
        """Commits `version` once it is in the memory of each host that has a replica; metrics of the transfer."""
        reports = list[Report](begun)
        if any(isinstance(reply, StagingBegun) for reply in begun):
            ends: list[StagingEnd] = ray.get(self.trainers.finish_staging())
            reports = [end.report for end in ends]
            self.times.held_s = max(end.held_s for end in ends)
        staged = one_per_host(reports)
        self.times.sealed([one.seal for one in staged if one.seal is not None])
        sent, metrics = self.transfer.stage(version, staged) if self.transfer else ([], {})
        self.times.stage_s = time.monotonic() - self.times.began
        ray.get(self.execute("commit", version))
        self.committed, self.times.committed = (version, [*staged, *sent]), time.monotonic()
        return metrics

    def wait(self, reach: Reach = Reach.LOADED, ids: Collection[str] | None = None) -> None:
        """As `WeightUpdate.wait` of the update that was begun last; before the first one it returns at once."""
        if self.update is not None:
            self.update.wait(reach, ids)

    def then(self, action: Callable[[], None]) -> None:
        """As `WeightUpdate.then`; before the first update the action is called now."""
        if self.update is None:
            action()
        else:
            self.update.then(action)

    def raise_failed(self) -> None:
        """Raises what `wait` would raise, if it is known by now; any thread may call it."""
        if (update := self.update) is not None:
            update.raise_failed()

    def under_way(self) -> tuple[int, float] | None:
        """The version that is being staged, committed or loaded, and for how many seconds; any thread may call it."""
        version, update, began = self.begun, self.update, self.times.began
        if version is None or (update is not None and update.version == version and not update.open):
            return None
        return version, time.monotonic() - began

    def rounds(self, together: bool = False) -> list[list[str]]:
        """Replicas that load together: all that released their memory, then `at_once` of the others on each host.

        Those on the trainer's devices come first, since training waits for them, and for no other. With `together`, for
        when none has a call that it could continue while others load, these load at once, and then those.
        """
        sharing = list(self.sharing)
        at_once = len(sharing) + len(self.others) if together else self.at_once
        first = [sharing] if self.released and sharing else self._rounds(sharing, at_once)
        return [*first, *self._rounds(self.others, at_once)]

    def _rounds(self, ids: Sequence[str], at_once: int) -> list[list[str]]:
        """Hosts do not share memory or buses, so that all of them load together."""
        by_host = defaultdict[str, list[str]](list)
        for name in ids:
            by_host[self.hosts.get(name, "")].append(name)
        longest = max(map(len, by_host.values()), default=0)
        return [[name for own in by_host.values() for name in own[i : i + at_once]] for i in range(0, longest, at_once)]

    def load(self, version: int, ids: Sequence[str]) -> None:
        """Loads into the replicas of one round; not in the trainer's thread."""
        assert self.committed is not None and self.committed[0] == version, f"version {version} is not committed"
        began, staged = time.monotonic(), self.committed[1]
        released = self.released and ids[0] in self.sharing
        if released:
            with self.syncing([device for name in ids for device in self.sharing[name]]):
                loaded = self._load_released(ids, version, staged)
        else:
            loaded = list(ray.get(self.execute("update_weights", ids, version, staged)))
        self.times.load_s += time.monotonic() - began
        if not released:
            self.times.pauses_s += self.pauses_s(loaded)
        if failed := [name for name in ids if name not in loaded]:
            logger.warning("%s did not load version %d, and will not serve it", ", ".join(failed), version)
            self.times.not_loaded += len(failed)

    def check(self) -> None:
        """Raises ReplicaLostError if no replica serves."""
        ray.get(self.metrics(False))

    def load_again(self, ids: Sequence[str]) -> list[str]:
        """Loads the committed weights again into replicas that had released them; returns those that then serve.

        The weights are still staged, so that neither the trainer nor a commit is waited for, but open loads are.
        """
        self.wait()
        assert self.committed is not None, "nothing is committed yet"
        return self._load_released(ids, *self.committed)

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
        loaded = list(ray.get(self.execute("update_weights", ids, version, staged)))
        if failed := [name for name in ids if name not in loaded]:
            logger.warning("%s did not load version %d, and waits for the next one", ", ".join(failed), version)
            self.check()
        return loaded

    def _load_released(self, ids: Sequence[str], version: int, staged: Staged) -> list[str]:
        """Takes back the memory of these replicas, and loads staged weights; returns those that then serve."""
        self.trainers.free_cached_memory()
        ray.get(self.execute("reclaim_memory", ids))
        return list(ray.get(self.execute("update_weights", ids, version, staged)))
