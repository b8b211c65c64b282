"""Ends a training that makes no more progress, or that lost an actor, with an error that names the stage it was at.

`Watchdog` watches the run: the trainer reports each stage that it enters, and waiting for groups is progress as long as
calls generate tokens. The training's thread may be blocked for ever: it is left alone, and who waits for it gets the
error. `StuckWatch` watches the parts of the run, with what each waits for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import KW_ONLY, dataclass
from typing import Any

import ray

from seamless_verl.errors import NoProgressError, shorten
from seamless_verl.runtime.process import BackgroundTask, stack_report
from seamless_verl.runtime.waits import TRAINER, Blocked, Limits, Wait, WaitKind, find_blocked, follow
from seamless_verl.trainer.run_waits import SETTINGS, stack_reports

logger = logging.getLogger(__name__)
CHECKS = 10  # within the time that may pass without progress, or within the shortest limit of a part
CHECKS_S = 5.0  # between two looks for actors that died, loads that failed, and parts that wait
LATE = 2  # times the interval of looks without a check: this process stood still
LINES = 4  # of one look; more nodes than that wait for the same in most cases

Recover = Callable[[Blocked], bool]
"""Recovers what is over its limit; False if that is not possible now. Returns without waiting for the effect."""


@dataclass(eq=False)
class Watchdog:
    """Watches one training."""

    limit_s: float  # without progress, after which the training is ended
    progress: Callable[[], float | None]  # a count that grows while calls generate; None where it is not known
    actors: Callable[[], Mapping[str, Any]]  # those that give a stack report, by name
    _: KW_ONLY
    checks: Sequence[Callable[[], None]] = ()
    """each raises if the training waits for ever: an actor died that it needs, or no replica has its weights"""
    explain: Callable[[], str] | None = None  # what the trainer waits for, in a line
    clock: Callable[[], float] = time.monotonic
    last_count = -1.0
    stage = "starting"

    def __post_init__(self) -> None:
        self.last_progress = self.entered = self.clock()  # the stage
        self.failure: Future[None] = Future()
        self.ended = threading.Event()

    def train(self, training: Callable[[], None]) -> None:
        """Runs the training to its end.

        Raises:
            NoProgressError: it made no progress for `limit_s`.
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
        count = self.progress()
        if count is not None and count != self.last_count:  # it is smaller after a restart of a data plane
            self.last_count, self.last_progress = count, self.clock()
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
        """Raises NoProgressError, after the stacks of every process were logged, if nothing moved for `limit_s`."""
        without_progress_s = self.without_progress_s()
        if without_progress_s < self.limit_s:
            return
        text = f"The training has made no progress for {without_progress_s:.1f} s.\nThe trainer was at: {self.stage}."
        if self.explain is not None:
            try:
                why = self.explain()
            except ray.exceptions.RayError as error:  # of a process that is asked; the run ends for another reason
                why = f"it is not known: {shorten(error)}"
            text = f"{text}\nWhat it waits for: {why}."
        reports = stack_reports({name: actor.stack_report.remote() for name, actor in self.actors().items()})
        logger.critical("%s\n%s\n%s", text, reports, stack_report())
        raise NoProgressError(text, self.limit_s)


@dataclass(eq=False)
class StuckWatch:
    """Names each part that is over its limit once, and recovers it once, until it was within its limit again.

    It gets a line in the log with its chain of waits, the stacks of the processes concerned, and its recovery, if there
    is one. If that does not help, and nothing else moves for as long as the limit, the run ends.
    """

    collect: Callable[[], Sequence[Wait]]  # the graph of waits now; asked for a few times within the shortest limit
    limits: Limits
    recoveries: Mapping[WaitKind, Recover]  # by the kind of the node that is over its limit
    _: KW_ONLY
    report: Callable[[Blocked], str]  # the stacks of the processes that this chain concerns
    without_progress_s: Callable[[], float]  # for how long neither the trainer nor any call has moved
    clock: Callable[[], float] = time.monotonic
    late = False

    def __post_init__(self) -> None:
        set_limits = [limit for limit in self.limits.values() if limit is not None]
        self.every_s = max(CHECKS_S, min(set_limits) / CHECKS) if set_limits else None
        self.looked = self.checked = self.clock()
        self.tried: dict[str, float | None] = {}  # when the recovery of each part over its limit was; None: not yet
        self.named, self.recovered = Counter[WaitKind](), Counter[WaitKind]()

    def check(self) -> None:
        """Looks if it is time to. A look that comes late is left out, and the next one is made whatever comes: where
        this process stood still, as on a machine that was suspended, the others did too, and all seem to wait.

        Raises:
            NoProgressError: something is over its limit, was not recovered, and nothing else moves.
        """
        stood_still_s = self.clock() - self.checked
        try:
            if self.every_s is not None and self.clock() - self.looked >= self.every_s:
                self.looked = self.clock()
                before, self.late = self.late, stood_still_s > LATE * self.every_s
                if self.late and not before:
                    logger.warning("no look for what waits: this process stood still for %.0f s", stood_still_s)
                else:
                    self.look()
        finally:
            self.checked = self.clock()  # what a look itself takes is no standing still

    def look(self) -> None:
        """Names, and recovers, what is over its limit now; raises NoProgressError as `check` does."""
        blocked = find_blocked(self.collect(), self.limits)
        new = [one for one in blocked if one.over.name not in self.tried]
        self.tried = {one.over.name: self.tried.get(one.over.name) for one in blocked}
        self.named.update(one.over.kind for one in new)
        for one in new[:LINES]:
            logger.error("%s\n%s", one, self.report(one))
        if len(new) > LINES:
            logger.error("%d more are over their limits", len(new) - LINES)
        for one in blocked:
            recover = self.recoveries.get(one.over.kind)
            if self.tried[one.over.name] is None and recover is not None and recover(one):
                self.tried[one.over.name] = self.clock()
                self.recovered[one.over.kind] += 1
        still_s = self.without_progress_s() if blocked else 0.0
        for one in blocked:
            limit = self.limits[one.over.kind]
            if limit is not None and still_s > limit and self._ends_run(one, limit):
                raise NoProgressError(str(one), limit, SETTINGS[one.over.kind])

    def _ends_run(self, one: Blocked, limit: float) -> bool:
        """Not while its recovery may still help, and not for a trainer that computes, nor for groups, whose scoring may
        take long: `no_progress_s` is theirs."""
        tried = self.tried[one.over.name]
        recovering = tried is not None and self.clock() - tried <= limit
        computing = one.culprit.kind in (WaitKind.TRAINER, WaitKind.COMPUTING)
        return not recovering and not computing and one.over.kind is not WaitKind.GROUP

    def explain(self) -> str:
        """What the trainer waits for at this moment, as one line."""
        nodes = {wait.name: wait for wait in self.collect()}
        return str(follow(nodes, nodes[TRAINER], self.limits))

    def metrics(self) -> dict[str, float]:
        """Counts of the run by kind, and how many nodes were over their limits at the last look; any thread may ask."""
        named = {f"watchdog/named/{kind}": float(count) for kind, count in self.named.copy().items()}
        recovered = {f"watchdog/recovery/{kind}": float(count) for kind, count in self.recovered.copy().items()}
        return {"watchdog/over_limit": float(len(self.tried)), **named, **recovered}
