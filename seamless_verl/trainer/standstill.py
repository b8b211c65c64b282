"""A run that stands still ends, and says what stood still.

The trainer marks its progress; a thread looks whether it still moves. Waiting for groups is progress while
the rollout manager's calls bring tokens. When nothing has moved for too long, the training, which runs in a
thread of its own and may be stuck in it for ever, is left behind with an error that names the culprit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import ray

from seamless_verl.errors import StandstillError
from seamless_verl.resources.watchdog import Finding, Watchdog, report, stacks, watch
from seamless_verl.trainer.startup import Concurrently

logger = logging.getLogger(__name__)
ANSWER_S = 10.0  # for a process to say where it is
LOOKS = 10  # within the time that may pass without progress
RUN = "run"


class Standstill:
    """Watches one training. `others` are actors that can be asked where they are, by name; `moved` counts what
    goes on outside of the trainer, or raises when nobody answers."""

    def __init__(self, limit_s: float, moved: Callable[[], float], others: Callable[[], Mapping[str, Any]]) -> None:
        self.watchdog = Watchdog({RUN: limit_s})
        self.limit_s, self.moved, self.others = limit_s, moved, others
        self.counted = -1.0
        self.stuck: Future[None] = Future()
        self.stage = "starting"

    def train(self, training: Callable[[], None]) -> None:
        """Run it to its end.

        Raises:
            StandstillError: it stood still; and whatever the training raises.
        """
        self.watchdog.began(RUN, "training")
        trained = Concurrently("training", training)
        with watch(self.watchdog, self.found, self.limit_s / LOOKS):
            wait([trained.future, self.stuck], return_when=FIRST_COMPLETED)
        (trained.future if trained.future.done() else self.stuck).result()

    def reached(self, stage: str) -> None:
        """The trainer is at this stage now, which is progress."""
        self.stage = stage
        self.watchdog.progress(RUN, "training")

    def found(self, findings: Sequence[Finding]) -> None:
        """Nothing moved in the trainer: unless something did outside of it, the run is over."""
        if self.outside():
            self.watchdog.progress(RUN, "training")
        elif not self.stuck.done():
            text = f"{report(findings)}\nThe trainer was at: {self.stage}."
            logger.critical("%s\n%s\n%s", text, self.places(), stacks())
            self.stuck.set_exception(StandstillError(text, self.limit_s))

    def outside(self) -> bool:
        """Whether tokens came since the last look; a rollout manager that was started again counts anew."""
        try:
            counted = self.moved()
        except Exception as error:  # whoever does not answer is part of the report
            logger.critical("the rollout manager does not answer: %s", error)
            return False
        before, self.counted = self.counted, counted
        return counted != before

    def places(self) -> str:
        """Where the other processes are, or that they do not say."""
        asked = {name: actor.where.remote() for name, actor in self.others().items()}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
        there = {
            name: ray.get(answer) if answer in ready else f"no answer in {ANSWER_S} s" for name, answer in asked.items()
        }
        return "\n".join(f"--- {name}\n{place}" for name, place in there.items())
