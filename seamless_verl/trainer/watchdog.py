"""A run that stands still ends, and says what stood still.

The trainer marks its progress; a thread looks whether it still moves. Waiting for groups is progress while
the rollout manager's calls bring tokens. When nothing has moved for too long, the training, which runs in a
thread of its own and may be stuck in it for ever, is left behind with an error that names its stage.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import ray

from seamless_verl.errors import NoProgressError
from seamless_verl.runtime.process import BackgroundTask, stack_report

logger = logging.getLogger(__name__)
ANSWER_S = 10.0  # for a process to say where it is
LOOKS = 10  # within the time that may pass without progress


class Watchdog:
    """Watches one training. `others` are actors that can be asked where they are, by name; `progress` counts what
    goes on outside of the trainer, or raises when nobody answers."""

    def __init__(
        self,
        limit_s: float,
        progress: Callable[[], float],
        others: Callable[[], Mapping[str, Any]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_s, self.progress, self.others, self.clock = limit_s, progress, others, clock
        self.counted = -1.0
        self.stage, self.moved = "starting", clock()
        self.stuck: Future[None] = Future()
        self.over = threading.Event()

    def train(self, training: Callable[[], None]) -> None:
        """Run it to its end.

        Raises:
            NoProgressError: it stood still; and whatever the training, or a look at it, raises.
        """
        self.moved = self.clock()
        trained = BackgroundTask("training", training)
        looking = threading.Thread(target=self.watch, name="watchdog", daemon=True)
        looking.start()
        try:
            wait([trained.future, self.stuck], return_when=FIRST_COMPLETED)
        finally:
            self.over.set()
            looking.join()
        (trained.future if trained.future.done() else self.stuck).result()

    def reached(self, stage: str) -> None:
        """The trainer is at this stage now, which is progress."""
        self.stage, self.moved = stage, self.clock()

    def watch(self) -> None:
        """Look until the training is over; what a look raises ends the training."""
        try:
            while not self.over.wait(self.limit_s / LOOKS):
                self.look()
        except Exception as error:  # handed to whoever waits in `train`; logged, for the training may end just now
            logger.critical("the watchdog ends the training: %s", error)
            self.stuck.set_exception(error)

    def look(self) -> None:
        """When nothing moved in the trainer for too long: unless something did outside of it, the run is over.

        Raises:
            NoProgressError: nothing did; where every process is has been logged.
        """
        still_s = self.clock() - self.moved
        if still_s < self.limit_s:
            return
        if self.outside():
            self.moved = self.clock()
            return
        text = f"The training has not moved for {still_s:.1f} s.\nThe trainer was at: {self.stage}."
        logger.critical("%s\n%s\n%s", text, self.places(), stack_report())
        raise NoProgressError(text, self.limit_s)

    def outside(self) -> bool:
        """Whether tokens came since it was last asked; a rollout manager that was started again counts anew."""
        try:
            counted = self.progress()
        except Exception as error:  # whoever does not answer is part of the report
            logger.critical("the rollout manager does not answer: %s", error)
            return False
        before, self.counted = self.counted, counted
        return counted != before

    def places(self) -> str:
        """Where the other processes are, or that they do not say."""
        asked = {name: actor.stack_report.remote() for name, actor in self.others().items()}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        there = {
            name: said(answer) if answer in ready else f"no answer in {ANSWER_S} s" for name, answer in asked.items()
        }
        return "\n".join(f"--- {name}\n{place}" for name, place in there.items())


def said(answer: ray.ObjectRef[str]) -> str:
    """The answer, or why there is none: a process that died is part of the report."""
    try:
        return str(ray.get(answer))
    except ray.exceptions.RayError as error:
        return f"no answer: {error}"
