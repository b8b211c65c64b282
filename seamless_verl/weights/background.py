"""Staging in a thread of a trainer's worker, which goes on meanwhile; holds back what would change the weights.

Between two optimizer steps nothing changes the weights, so that the worker's next forward and backward passes may run
while a thread copies. The worker's own thread starts the copy, and calls `hold` before it changes or moves the weights.
Another thread, of Ray's, waits for the report.

Owned state: the one copy that was started last.

Invariants:
- At most one copy is open. It is started only after the one before has ended, which `weights/commit.py` waits for.
- After `hold` no copy is open, until the same thread starts the next one.
- Every copy ends, with a report or with the error that `result` raises; `hold` does not raise it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from seamless_verl.weights.staging import Report


class StagingBegun(NamedTuple):
    """A rank's reply that it copies its share in the background, to the memory of this Ray node."""

    host: str


class StagingEnd(NamedTuple):
    """A rank's report of the copy, and the seconds for which it held back a change of the weights."""

    report: Report
    held_s: float = 0.0


class BackgroundStaging:
    """Owns the thread that copies."""

    def __init__(self) -> None:
        self._end: Future[StagingEnd] | None = None
        self._held_since: float | None = None

    def start(self, copy: Callable[[], Report]) -> None:
        """Copies in a thread."""
        assert self._end is None or self._end.done(), "a version is staged while another one still is"
        self._end, self._held_since = Future(), None
        threading.Thread(target=self._run, args=(copy, self._end), name="staging", daemon=True).start()

    def hold(self) -> None:
        """Returns when no copy is open. Called before the weights change or move, in the thread that starts copies."""
        if self._end is not None and not self._end.done():
            self._held_since = self._held_since or time.monotonic()
            wait([self._end])

    def result(self) -> StagingEnd:
        """The end of the last copy, when it has ended; raises its error. Without any copy, an end without a report."""
        return StagingEnd(None) if self._end is None else self._end.result()

    def _run(self, copy: Callable[[], Report], end: Future[StagingEnd]) -> None:
        try:
            report = copy()
        except BaseException as error:  # raised to who asks for the result
            end.set_exception(error)
            return
        held_since = self._held_since
        end.set_result(StagingEnd(report, 0.0 if held_since is None else time.monotonic() - held_since))
