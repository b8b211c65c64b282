"""Starts lost replicas again, while the run goes on with the others.

A thread asks the data plane which replicas it gave up, and starts another server with its engine on the devices of
each, or of another node with its labels. What has started is connected by the trainer's thread alone, where weights may
be loaded, so that it serves no other weights. On an accelerator that it shares with the trainer it also starts there:
vLLM measures the memory that it finds free, which neither training nor the copying of a version may change meanwhile.

Invariants:
- A replica is started by one thread at a time, and only after what was left of its lost server is dead.
- Its handle, by which the trainer finds its server, is replaced only after the new server listens.
- What ends a start is data: the reason is logged and counted, and another start follows or the replica is abandoned.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import ray

from seamless_verl.config.schema import WatchdogConfig
from seamless_verl.data_plane.client import DataPlaneClient, PlacedReplica
from seamless_verl.errors import ReplicaLostError, shorten
from seamless_verl.rollout.restarts import LossReason, ReplicaLoss, Restarts, RestartStage
from seamless_verl.runtime.actor_death import death_reason
from seamless_verl.trainer.servers import STOP_S, SeamlessServers

logger = logging.getLogger(__name__)
WAITING_S = 60.0  # between two lines on a replica that waits for devices
LOOK_S = 2.0  # between two looks for replicas that were given up
REPLY_S = 10.0  # for the data plane's reply; it may be starting again itself
SETTING = "seamless.restarts"
ABOUT_TO_CONNECT = frozenset({RestartStage.STARTING, RestartStage.STARTED})


def noticed_s(watchdog: WatchdogConfig) -> dict[LossReason, float]:
    """For how long a replica hangs among those that serve before it is given up, in seconds, by the reason."""
    return {LossReason.LATE: float(watchdog.transition_s), LossReason.STUCK: watchdog.silent_s}


@dataclass(eq=False)
class ReplicaStarter:
    """Owns the starts of a run; `begin` begins to look for losses."""

    servers: SeamlessServers
    client: DataPlaneClient
    _: KW_ONLY
    limit: int  # starts of a replica in a row; with 0 nothing is started
    noticed_s: Mapping[LossReason, float]  # seconds after which a loss is noticed; for other reasons it is at once
    keep_kv: bool  # as given to `DataPlaneClient.attach`
    must_wait: Callable[[PlacedReplica], bool]
    """whether it may start only in the trainer's thread, between two computations"""
    wait_committed: Callable[[], Any]
    """called before such a start; returns when no version is copied from the device any more"""
    free_memory: Callable[[], Any]  # called then; frees memory of the device that the trainer does not use
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.placed = {placed.replica_id: placed for placed in self.servers.placed}
        self.restarts = Restarts(self.placed, self.limit, noticed_s=self.noticed_s)
        self.returns: Counter[str] = Counter()  # of each replica, by which a reply from before a return is known
        self.drained: set[str] = set()  # replicas that were ended and are not known to be lost yet
        self.missing: dict[str, float] = {}  # replicas without devices: when that was last logged
        self.started: dict[str, Any] = {}  # verl's replicas that run and are not connected
        self.lock = threading.Lock()  # of `restarts`, `returns` and `started`
        self.closed = threading.Event()
        self.threads: list[threading.Thread] = []

    def begin(self) -> None:
        """From now on losses are looked for."""
        if self.restarts.limit:
            self._run(self._watch, "replica restarts")

    # Its own threads

    def _watch(self) -> None:
        try:
            while not self.closed.wait(LOOK_S):
                self.look()
                self.drain()
                for name, number in self._begin_due(between_computations=False).items():
                    self._run(partial(self._start, name, number), f"start of {name}")
        except BaseException as error:
            self.error = error

    def raise_failed(self) -> None:
        """Raises what ended the looking for losses, if something did: lost replicas would be waited for in vain."""
        if self.error is not None:
            raise self.error

    def look(self) -> None:
        """Asks the data plane for losses. One that does not reply now is asked again."""
        with self.lock:
            returns = self.returns.copy()
        try:
            given_up: dict[str, ReplicaLoss] = ray.get(self.client.actor.given_up.remote(), timeout=REPLY_S)
        except ray.exceptions.RayError as error:  # the trainer's next command raises it, if it lasts
            logger.warning("the data plane does not say which replicas are lost: %s", shorten(error))
            return
        for name, loss in given_up.items():
            with self.lock:
                known = self.restarts.stage(name) is not RestartStage.SERVING or self.returns[name] != returns[name]
                stage = self.restarts.stage(name) if known else self.restarts.lost(name, loss.reason, loss.served_s)
            if not known:
                self._log(name, f"is lost ({loss.reason}: {loss.detail})", stage)

    def drain(self) -> None:
        """Ends replicas whose node is announced to leave, while others serve; they start again on another node."""
        with self.lock:
            serving = {name for name in self.placed if self.restarts.stage(name) is RestartStage.SERVING}
        leaving = serving & self.servers.leaving()
        for name in sorted(leaving - self.drained) if serving - leaving else ():
            logger.warning("%s is ended, since its node is announced to leave; its calls go on elsewhere", name)
            self.drained.add(name)
            self._end(partial(self.servers.leave, self.placed[name]))
        self.drained &= leaving

    def _begin_due(self, *, between_computations: bool) -> dict[str, int]:
        """The replicas that are to be started now and here, each with the number of its start."""
        with self.lock:
            due = [name for name in self.restarts.due() if self.must_wait(self.placed[name]) is between_computations]
        due = [name for name in due if self._has_devices(name)]
        with self.lock:  # only the thread that found them due begins them
            return {name: self.restarts.begin(name) for name in due}

    def _has_devices(self, name: str) -> bool:
        """Whether the replica has devices to start on: its own, or those of another node where its own are gone."""
        missing = self.servers.missing_for(self.placed[name])
        if missing is None:
            self.missing.pop(name, None)
        elif time.monotonic() - self.missing.get(name, -WAITING_S) >= WAITING_S:
            self.missing[name] = time.monotonic()
            logger.warning("%s waits for devices, since its own are gone: %s", name, missing)
        return missing is None

    def _start(self, name: str, number: int) -> None:
        logger.warning("%s starts again, start %d of %s=%d", name, number, SETTING, self.restarts.limit)
        began = time.monotonic()
        try:
            started = self.servers.start_again(self.placed[name])
        except Exception as error:  # whatever its node, its device or its engine has
            self._failed(name, error)
            return
        logger.warning("%s has started in %.1f s; it serves when it has the weights", name, time.monotonic() - began)
        with self.lock:
            self.started[name] = started
            self.restarts.started(name)
        if self.closed.is_set():
            self._discard(self.placed[name], started)

    def _discard(self, placed: PlacedReplica, started: Any) -> None:
        self._end(partial(self.servers.discard, placed, started))

    def _end(self, end: Callable[[], None]) -> None:
        """What does not end in time makes the next start fail, and ends with the job."""
        try:
            end()
        except TimeoutError as error:
            logger.warning("%s", error)

    def _failed(self, name: str, error: Exception) -> None:
        with self.lock:
            self.started.pop(name, None)
            stage = self.restarts.failed(name)
        self._log(name, f"could not be started again ({type(error).__name__}: {shorten(death_reason(error))})", stage)

    def _log(self, name: str, what: str, stage: RestartStage) -> None:
        if stage is RestartStage.ABANDONED:
            logger.error("%s %s, and is abandoned after its last start (%s)", name, what, SETTING)
            self.client.actor.abandon.remote(name)
        else:
            logger.warning("%s %s; its next start is in %.0f s", name, what, self.restarts.next_start_s(name))

    # The trainer's thread

    def before_commit(self) -> None:
        """Starts what may start only here, and connects what has started: the commit that follows loads its weights."""
        self._connect()

    def while_waiting(self, load: Callable[[Sequence[str]], Any]) -> None:
        """As before a commit, but `load` then loads the committed weights."""
        if connected := self._connect():
            load(connected)

    @property
    def starting(self) -> bool:
        """Whether a replica is about to be connected."""
        with self.lock:
            return any(self.restarts.stage(name) in ABOUT_TO_CONNECT for name in self.placed)

    def _connect(self) -> list[str]:
        for name, number in self._begin_due(between_computations=True).items():
            self.wait_committed()
            self.free_memory()
            self._start(name, number)
        with self.lock:
            started = dict(self.started)
        connected = []
        for name, replica in started.items():
            placed = self.placed[name]
            try:
                self.client.attach([replace(placed, replica=replica)], keep_kv=self.keep_kv)
            except (ray.exceptions.RayError, ReplicaLostError) as error:  # it died since it started, or hangs
                self._discard(placed, replica)
                self._failed(name, error)
                continue
            self.servers.replace(placed, replica)
            with self.lock:
                del self.started[name]
                away_s = self.restarts.came_back(name)
                self.returns[name] += 1
            logger.warning("%s is back after %.1f s, and loads the committed weights", name, away_s)
            connected.append(name)
        return connected

    def metrics(self) -> dict[str, float]:
        """Losses by reason, returns and starts, after their conservation law was checked; empty with a limit of 0."""
        with self.lock:
            self.restarts.check_integrity()
            return self.restarts.metrics() if self.restarts.limit else {}

    def close(self) -> None:
        """Ends what has started and is not connected; a start that does not end in time ends with the job."""
        self.closed.set()
        deadline = time.monotonic() + STOP_S
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self.lock:
            ending = [replica.server_handle.end.remote() for replica in self.started.values()]
        ray.wait(ending, num_returns=len(ending), timeout=STOP_S) if ending else None

    def _run(self, target: Callable[[], None], name: str) -> None:
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        self.threads.append(threading.Thread(target=target, name=name, daemon=True))
        self.threads[-1].start()
