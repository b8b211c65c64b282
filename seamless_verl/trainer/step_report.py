"""What verl does between two steps is done beside the next one: metrics, a dump, clearing of rows, and logging.

verl reads all columns of a step's samples and pads them to the longest, which takes the longer the larger the batch,
while devices that train have nothing to do. None of it is needed to go on.

Owned state: the report of a step, from its first piece to the end of its last. Its transitions:

    none --open--> open --end--> complete --start--> running --finish--> none

`open` and `end` are called by verl's loop, in its thread, and so is `add` for what belongs to the report; pieces run in
this order in a thread of the report's own. That is started when the trainer next waits, for groups or for workers that
update: before, it would take time of the same interpreter from what devices wait for. There is one report at a time, so
that steps are logged in their order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

from seamless_verl.runtime.process import BackgroundTask

logger = logging.getLogger(__name__)
Piece = Callable[[], Any]
LOG_FROM_ANY_THREAD = frozenset({"console", "file", "tensorboard", "wandb"})
"""verl's loggers that are not bound to the thread that made them, as mlflow's run and trackio's are."""


class StepReport:
    """The pieces of a step's report; without an open one, each is done at once."""

    def __init__(self) -> None:
        self._pieces: list[Piece] | None = None
        self._complete: list[Piece] | None = None
        self._lock = threading.Lock()
        self._running: BackgroundTask[None] | None = None
        self._opened_by = 0  # the thread

    def open(self, piece: Piece) -> None:
        """The next report, of which this is the first piece; waits for the last one."""
        self.finish()
        self._pieces, self._opened_by = [piece], threading.get_ident()

    def add(self, piece: Piece) -> None:
        """One more piece, if the thread is the one that opened the report."""
        if self._pieces is None or self._opened_by != threading.get_ident():
            piece()
        else:
            self._pieces.append(piece)

    def end(self, piece: Piece) -> None:
        """The last piece: an open report is complete."""
        self.add(piece)
        if self._pieces is not None:
            self._complete, self._pieces = self._pieces, None

    def start(self) -> None:
        """A complete report now runs: the trainer waits. A thread for which it waits may say so, too."""
        with self._lock:
            pieces, self._complete = self._complete, None
            if pieces is not None:
                self._running = BackgroundTask("report of a step", partial(_run, pieces))

    @property
    def is_open(self) -> bool:
        """Whether the next `end` completes a report."""
        return self._pieces is not None

    @property
    def runs(self) -> bool:
        """Whether a report is complete and not known to have ended."""
        return self._complete is not None or self._running is not None

    def finish(self) -> None:
        """Returns when a complete report, if any, has ended; raises what ended it."""
        self.start()
        if self._running is not None:
            running, self._running = self._running, None
            running.result()

    def raise_failed(self) -> None:
        """Raises what ended the report that runs, if something did; any thread may ask."""
        running = self._running
        if running is not None and running.future.done():
            running.result()

    def finish_within(self, seconds: float) -> None:
        """Where training has failed: what was trained before is still logged, unless that takes longer."""
        if self._pieces is not None:
            logger.error("The metrics of the last whole step were not logged: it ended between two pieces of them.")
        self.start()
        if self._running is None:
            return
        done, _ = wait([self._running.future], timeout=seconds)
        if not done:
            logger.error("The metrics of the last whole step were not logged: they took more than %g s.", seconds)
        elif error := self._running.future.exception():
            logger.error("The metrics of the last whole step were not logged.", exc_info=error)


def _run(pieces: Sequence[Piece]) -> None:
    for piece in pieces:
        piece()


class ReportedQueue:
    """The module `transfer_queue` as verl's trainer sees it: of a step that is reported, rows are cleared last."""

    def __init__(self, queue: Any, report: StepReport) -> None:
        self._queue, self._report = queue, report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def kv_clear(self, *args: Any, **kwargs: Any) -> None:
        self._report.add(partial(self._queue.kv_clear, *args, **kwargs))
