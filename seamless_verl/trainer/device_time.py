"""Where the job's device-seconds go: the notes of its processes, gathered once a step into one ledger.

A device is named for its pool and its place in it. Its trainer's process notes computations, its engine's
server notes running requests, and the trainer's own process notes hand-overs and weight updates.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ray

from seamless_verl.resources.ledger import (
    SAME_CLOCK,
    Activity,
    ActivityReport,
    ClockOffset,
    DeviceUse,
    Ledger,
    NodeActivity,
    Trace,
)

TRACE = ".trace.json"
COMPUTATIONS = ("infer_batch", "train_mini_batch")  # of verl's TrainingWorker


def train_device(index: int) -> str:
    return f"train-{index}"


def rollout_device(index: int) -> str:
    return f"rollout-{index}"


def note_computations(worker: Any, activity: Activity) -> None:
    """Have a TrainingWorker's computations noted as TRAIN."""

    def noted(computation: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(computation)
        def computed(*args: Any, **kwargs: Any) -> Any:
            with activity.doing(DeviceUse.TRAIN):
                return computation(*args, **kwargs)

        return computed

    for name in COMPUTATIONS:
        setattr(worker, name, noted(getattr(worker, name)))


class DeviceTime:
    """Owns the ledger of a run, its trace and its picture, in `folder`; `ask` gathers what the processes noted."""

    def __init__(self, folder: Path, devices: Sequence[str], ask: Callable[[], Iterable[NodeActivity]]) -> None:
        self.folder, self.devices, self.ask = folder, tuple(devices), ask
        self.control = Activity("trainer", self.devices)
        self.clocks: dict[str, ClockOffset] = {ray.get_runtime_context().get_node_id(): SAME_CLOCK}
        self.ledger: Ledger | None = None

    def doing(self, kind: DeviceUse, devices: Iterable[str]) -> AbstractContextManager[None]:
        return self.control.doing(kind, devices)

    def begin(self) -> None:
        """The books open now; what was done before is not in them."""
        list(self.gathered())
        started = time.monotonic()
        self.trace = Trace(unused(self.folder, "devices", TRACE), self.devices, started)
        self.ledger = Ledger(self.devices, started, followers=[self.trace])

    def close(self, label: str) -> dict[str, float]:
        """Close a period: its metrics, after the books have been found to close."""
        if self.ledger is None:
            return {}
        for taken, clock in self.gathered():
            self.ledger.add(taken, clock)
        self.ledger.close(time.monotonic(), label)
        self.ledger.check_integrity()
        return self.ledger.metrics()

    def finish(self) -> Path | None:
        """The run as a picture: devices as lanes; None for a run that never began."""
        from seamless_verl.resources.ledger.drawing import draw_timeline  # only here is anything drawn

        if self.ledger is None:
            return None
        self.close("end")
        picture = self.trace.path.with_name(self.trace.path.name.removesuffix(TRACE) + ".png")
        return draw_timeline(self.trace.path, picture)

    def gathered(self) -> Iterator[tuple[ActivityReport, ClockOffset]]:
        """Each process's notes, with its clock against ours."""
        yield self.control.take(), SAME_CLOCK
        sent = time.monotonic()
        answers = list(self.ask())
        received = time.monotonic()
        for there in answers:
            if there.node not in self.clocks:
                self.clocks[there.node] = ClockOffset.of_round_trip(sent, there.report.until, received)
            elif (known := self.clocks[there.node]) is not SAME_CLOCK:
                trip = ClockOffset.of_round_trip(sent, there.report.until, received)
                self.clocks[there.node] = known.better(trip, received)
            yield there.report, self.clocks[there.node]


def unused(folder: Path, name: str, ending: str) -> Path:
    """The first of name, name-2, name-3, ... that is not there: a resumed run keeps what it left before."""
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(path for path in (folder / f"{one}{ending}" for one in names) if not path.exists())
