"""Collects the activity reports of the job's processes, once a step, into the device-second ledger.

A device's training worker reports computations, the engine's server running requests, and the trainer's own process
hand-overs and weight updates.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray

from seamless_verl.data_plane.server_calls import ServerCalls
from seamless_verl.resources.ledger.activity import (
    SAME_CLOCK,
    Activity,
    ActivityReport,
    ClockOffset,
    DeviceUse,
    NodeActivity,
)
from seamless_verl.resources.ledger.ledger import Ledger
from seamless_verl.resources.ledger.trace import END, Trace
from seamless_verl.runtime.actor_death import ACTOR_GONE, death_reason

logger = logging.getLogger(__name__)
TRACE = ".trace.json"
NVML_BUSY = "devices/nvml_busy"  # mean over the devices that generate; on NVIDIA's alone
COMPUTATIONS = ("infer_batch", "train_mini_batch")  # of verl's TrainingWorker


def train_device(index: int) -> str:
    return f"train-{index}"


def rollout_device(index: int) -> str:
    return f"rollout-{index}"


@dataclass(frozen=True)
class LostSource:
    """A source of reports whose process is dead, or does not reply: what it does now is not known."""

    source: str


def reply_or_loss(source: str, reply: Any) -> NodeActivity | LostSource:
    """The activity that a server's actor reports, or LostSource if the actor is dead."""
    try:
        activity: NodeActivity = ray.get(reply)
    except ACTOR_GONE as error:
        logger.warning("%s is dead and reports no more activity: %s", source, death_reason(error))
        return LostSource(source)
    return activity


def server_reports(calls: ServerCalls, servers: Iterable[str]) -> Iterator[NodeActivity | LostSource]:
    """The activity of these replicas' servers, which `calls` asked for it.

    One that does not reply is a lost source until it does. Its late report then covers that time. It was asked for
    earlier than the others, which matters where its host's clock is compared with ours.
    """
    ended = calls.end()
    for name in servers:
        if (call := ended.get(name)) is None:
            yield LostSource(name)
            continue
        reply = reply_or_loss(name, call.reply)
        yield replace(reply, sent=call.sent) if call.late and isinstance(reply, NodeActivity) else reply


def record_computations(worker: Any, activity: Activity) -> None:
    """Makes a TrainingWorker record its computations as TRAIN."""
    for name in COMPUTATIONS:
        setattr(worker, name, _recorded(getattr(worker, name), activity))


def _recorded(computation: Callable[..., Any], activity: Activity) -> Callable[..., Any]:
    @functools.wraps(computation)
    def run(*args: Any, **kwargs: Any) -> Any:
        with activity.doing(DeviceUse.TRAIN):
            return computation(*args, **kwargs)

    return run


class DeviceTime:
    """Owns the ledger of a run, and its trace in `folder`; `collect` returns the processes' reports."""

    def __init__(
        self, folder: Path, devices: Sequence[str], collect: Callable[[], Iterable[NodeActivity | LostSource]]
    ) -> None:
        self.folder, self.devices, self.collect = folder, tuple(devices), collect
        self.control = Activity("trainer", self.devices)
        self.clocks: dict[str, ClockOffset] = {ray.get_runtime_context().get_node_id(): SAME_CLOCK}
        self.ledger: Ledger | None = None
        self.nvml_busy: list[float] = []  # of the open period, a share for each device that was measured

    def doing(self, kind: DeviceUse, devices: Iterable[str]) -> AbstractContextManager[None]:
        return self.control.doing(kind, devices)

    def begin(self) -> None:
        """Starts the ledger now; earlier activity is not counted."""
        list(self._reports())
        self.nvml_busy = []
        started = time.monotonic()
        self.trace = Trace(unused_path(self.folder, "devices", TRACE), self.devices, started)
        self.ledger = Ledger(self.devices, started, trace=self.trace)

    def close(self, label: str) -> dict[str, float]:
        """Closes a period; returns its metrics, after the ledger was found to add up."""
        if self.ledger is None:
            return {}
        for report in self._reports():
            if isinstance(report, LostSource):
                self.ledger.source_lost(report.source)
            else:
                self.ledger.add(*report)
        self.ledger.close(time.monotonic(), label)
        self.ledger.check_integrity()
        busy, self.nvml_busy = self.nvml_busy, []
        return self.ledger.metrics() | ({NVML_BUSY: sum(busy) / len(busy)} if busy else {})

    def idle_share(self, devices: Sequence[str]) -> float:
        """Of the time of these devices in the last period that was closed; 0 before the first."""
        if self.ledger is None or (report := self.ledger.last_report) is None or not devices:
            return 0.0
        return sum(report.seconds[device][DeviceUse.IDLE] for device in devices) / (report.wall * len(devices))

    def finish(self) -> Path | None:
        """Closes the run's last period; returns the trace's path, None for a run that never began."""
        if self.ledger is None:
            return None
        self.close(END)
        return self.trace.path

    def _reports(self) -> Iterator[tuple[ActivityReport, ClockOffset] | LostSource]:
        """Each process's report, with the offset of its host's clock from ours."""
        yield self.control.take(), SAME_CLOCK
        sent = time.monotonic()
        replies = list(self.collect())
        received = time.monotonic()
        for reply in replies:
            if isinstance(reply, LostSource):
                yield reply
                continue
            self.nvml_busy += reply.nvml_busy
            offset = self.clocks.get(reply.node)
            if offset is not SAME_CLOCK:
                asked = sent if reply.sent is None else reply.sent
                measured = ClockOffset.of_round_trip(asked, reply.report.until, received)
                self.clocks[reply.node] = measured if offset is None else offset.better(measured, received)
            yield reply.report, self.clocks[reply.node]


def unused_path(folder: Path, name: str, ending: str) -> Path:
    """The first of name, name-2, name-3, ... that does not exist: a resumed run keeps its earlier files."""
    stems = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(path for path in (folder / f"{stem}{ending}" for stem in stems) if not path.exists())
