"""Validation beside training: it submits its prompts, and what comes of them is taken when their groups have ended.

verl's own code does both, with a wait between. So it runs in a thread of its own, in turns with the trainer: of the two
exactly one runs at any time, and neither sees the other's state change under it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Generic, TypeVar

from seamless_verl.runtime.process import BackgroundTask

if TYPE_CHECKING:
    from seamless_verl.trainer.replay_buffer import SeamlessReplayBuffer

T = TypeVar("T")
STEP = "seamless/validation/step"
LATER = "seamless/validation/later"


class InTurns(Generic[T]):
    """Work that runs in a thread while its owner waits in `proceed`, until it pauses or ends."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self.ended = self.works = False  # whether it is the work's turn
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._task = BackgroundTask(name, partial(self._run, work))

    def _run(self, work: Callable[[], T]) -> T:
        self._turn.acquire()
        try:
            return work()
        finally:
            self.ended = True
            self._back.release()

    def proceed(self) -> None:
        """The owner's: returns when it is its turn again."""
        self.works = True
        self._turn.release()
        self._back.acquire()
        self.works = False

    def pause(self) -> None:
        """The work's: returns when it is its turn again."""
        self._back.release()
        self._turn.acquire()

    def result(self) -> T:
        """Of work that has ended; raises what it raised."""
        return self._task.result()


@dataclass(eq=False)
class ValidationBeside:
    """Validates one version at a time. Owned state: the validation that runs, of which step it is, and how many groups
    it waits for. No checkpoint has it: a run that is resumed does not go on with it."""

    buffer: SeamlessReplayBuffer
    wait: Callable[[], None]  # for any group to end
    enter_stage: Callable[[str], None]
    step: int = 0
    lacking: int = 0
    running: InTurns[dict[str, float]] | None = None

    @property
    def works(self) -> bool:
        """Whether it is the validation's turn."""
        return self.running is not None and self.running.works

    def begin(self, step: int, validate: Callable[[], dict[str, float]]) -> None:
        """Submits the prompts of verl's `validate` of the weights after `step`; none runs."""
        assert self.running is None
        self.step, self.buffer.validated = step, []
        self.buffer.before_validated = self._await_groups
        self.running = InTurns("validation", validate)
        self.running.proceed()

    def _await_groups(self, number: int) -> None:
        """In the validation's turn: gives the turn away until so many groups have ended."""
        self.lacking = number
        while self.buffer.validated_groups() < number and self.running is not None:
            self.running.pause()

    def take(self) -> dict[str, float]:
        """Its metrics, if it has ended by the last look at the queue; nothing else."""
        if (running := self.running) is None:
            return {}
        if not running.ended and self.buffer.validated_groups() >= self.lacking:
            running.proceed()
        if not running.ended:
            return {}
        self.running, self.buffer.before_validated = None, None
        metrics, newest = running.result(), self.buffer.validated
        return metrics | {STEP: float(self.step)} | ({LATER: fmean(newest) - self.step} if newest else {})

    def end(self) -> dict[str, float]:
        """Waits for it, and gives its metrics; {} if none runs."""
        if self.running is not None:
            self.enter_stage(f"validating, step {self.step}")
        while self.running is not None:
            if metrics := self.take():
                return metrics
            self.wait()
            self.buffer.outstanding()  # looks at the queue
        return {}
