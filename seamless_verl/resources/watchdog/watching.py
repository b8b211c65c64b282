"""A thread that asks the watchdog now and then.

Invariant: `on_stuck` is called when something is stuck that was not at the look before, and not again for the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from seamless_verl.resources.watchdog.findings import Finding
from seamless_verl.resources.watchdog.marks import Key, Watchdog

log = logging.getLogger(__name__)
OnStuck = Callable[[Sequence[Finding]], None]


class Watch:
    """A running watch; as a context manager it stops at the end of the block.

    An error of `on_stuck` ends the watch: it is logged at once, and raised by `stop`.
    """

    def __init__(self, watchdog: Watchdog, on_stuck: OnStuck, interval: float) -> None:
        if not interval > 0:
            raise ValueError(f"interval={interval!r}: give the seconds between two looks, above 0")
        self.failure: Exception | None = None
        self._watchdog, self._on_stuck, self._interval = watchdog, on_stuck, interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and waits for it; may be called again. Raises what `on_stuck` had raised."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        known: set[tuple[Key, float]] = set()
        while not self._stop.wait(self._interval):
            findings = self._watchdog.check()
            found = {(Key(finding.kind, finding.id), finding.began) for finding in findings}
            if found - known and not self._tell(findings):
                return
            known = found

    def _tell(self, findings: Sequence[Finding]) -> bool:
        try:
            self._on_stuck(findings)
        except Exception as error:  # the edge of supervision: nobody is above a thread to catch it
            log.exception("the watchdog ends: what it was to call about %d findings failed", len(findings))
            self.failure = error
            return False
        return True


def watch(watchdog: Watchdog, on_stuck: OnStuck, interval: float) -> Watch:
    """Looks every `interval` seconds, in a thread of its own, and calls `on_stuck` there with all findings."""
    return Watch(watchdog, on_stuck, interval)
