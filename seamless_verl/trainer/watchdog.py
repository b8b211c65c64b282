"""Ends a training that lost an actor, or that makes no more progress, with an error that names the stage it was at.

The trainer reports each stage that it enters, and a thread checks when it last did. Waiting for groups is progress as
long as calls generate tokens. The training runs in a thread of its own, which may be blocked for ever. After too long
without progress that thread is left alone, and the error is raised in the thread that waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import ray

from seamless_verl.errors import NoProgressError, shorten
from seamless_verl.runtime.process import BackgroundTask, stack_report

logger = logging.getLogger(__name__)
REPLY_S = 10.0  # for a process to report its stacks
CHECKS = 10  # within the time that may pass without progress
CHECKS_S = 5.0  # between two looks for actors that died, or loads that failed


class Watchdog:
    """Watches one training.

    Args:
        limit_s: seconds without progress after which the training is ended.
        progress: a count that grows while calls generate; None where it is not known.
        actors: the actors that give a stack report, by name.
        checks: each raises if the training waits for ever: an actor died that it needs, or no replica has its weights.
        explain: what the trainer waits for, in a line, where that is known.
    """

    def __init__(
        self,
        limit_s: float,
        progress: Callable[[], float | None],
        actors: Callable[[], Mapping[str, Any]],
        *,
        checks: Sequence[Callable[[], None]] = (),
        explain: Callable[[], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s, self.progress, self.actors, self.clock = limit_s, progress, actors, clock
        self.checks, self.explain = checks, explain
        self.last_count = -1.0
        self.stage, self.last_progress = "starting", clock()
        self.entered = self.last_progress  # the stage
        self.failure: Future[None] = Future()
        self.ended = threading.Event()

    def train(self, training: Callable[[], None]) -> None:
        """Runs the training to its end.

        Raises:
            NoProgressError: it made no progress for `limit_s`.
            ActorLostError: an actor died without which it waits for ever.
            WeightsNotLoadedError, ReplicaLostError: a load failed, or after the loads no replica serves.
            Exception: whatever the training, or a check of it, raises.
        """
        self.last_progress = self.clock()
        task = BackgroundTask("training", training)
        watching = threading.Thread(target=self.watch, name="watchdog", daemon=True)
        watching.start()
        try:
            wait([task.future, self.failure], return_when=FIRST_COMPLETED)
        finally:
            self.ended.set()
            watching.join()
        (task.future if task.future.done() else self.failure).result()

    def enter_stage(self, stage: str) -> None:
        """The trainer is at this stage now, which is progress."""
        self.stage = stage
        self.last_progress = self.entered = self.clock()

    def stage_s(self) -> tuple[str, float]:
        """The stage, and for how many seconds the trainer has been in it."""
        return self.stage, self.clock() - self.entered

    def without_progress_s(self) -> float:
        """Seconds since the trainer entered a stage, or calls were last seen to generate; asks the data planes."""
        if self.calls_progressed():
            self.last_progress = self.clock()
        return self.clock() - self.last_progress

    def watch(self) -> None:
        """Checks until the training has ended; an error of a check ends the training."""
        try:
            while not self.ended.wait(min(CHECKS_S, self.limit_s / CHECKS)):
                for check in (*self.checks, self.check):
                    check()
        except Exception as error:  # raised in `train`; logged too, since the training may end at this moment
            logger.critical("the watchdog ends the training: %s", error)
            self.failure.set_exception(error)

    def check(self) -> None:
        """Checks that the trainer entered a stage, or calls generated, within `limit_s`.

        Raises:
            NoProgressError: neither; the stacks of every process have been logged.
        """
        without_progress_s = self.without_progress_s()
        if without_progress_s < self.limit_s:
            return
        text = f"The training has made no progress for {without_progress_s:.1f} s.\nThe trainer was at: {self.stage}."
        if self.explain is not None:
            text = f"{text}\nWhat it waits for: {explained(self.explain)}."
        logger.critical("%s\n%s\n%s", text, self.stack_reports(), stack_report())
        raise NoProgressError(text, self.limit_s)

    def calls_progressed(self) -> bool:
        """Whether the count changed since the last reply; it is smaller after a restart of a data plane."""
        count = self.progress()
        if count is None:
            return False
        before, self.last_count = self.last_count, count
        return count != before

    def stack_reports(self) -> str:
        """The stack report of each actor, or why there is none."""
        return stack_reports({name: actor.stack_report.remote() for name, actor in self.actors().items()})


def stack_reports(replies: Mapping[str, ray.ObjectRef[str]]) -> str:
    """The reports of these processes, by name, each under its name, or why there is none."""
    ready, _ = ray.wait(list(replies.values()), num_returns=len(replies), timeout=REPLY_S) if replies else ([], [])
    reports = {
        name: report_or_error(reply) if reply in ready else f"no reply within {REPLY_S} s"
        for name, reply in replies.items()
    }
    return "\n".join(f"--- {name}\n{report}" for name, report in reports.items())


def explained(explain: Callable[[], str]) -> str:
    """What it says; an error of a process that is asked is said instead, since the run ends for another reason."""
    try:
        return explain()
    except ray.exceptions.RayError as error:
        return f"it is not known: {shorten(error)}"


def report_or_error(reply: ray.ObjectRef[str]) -> str:
    """The stack report, or the error of an actor that died."""
    try:
        return str(ray.get(reply))
    except ray.exceptions.RayError as error:
        return f"no reply: {error}"
