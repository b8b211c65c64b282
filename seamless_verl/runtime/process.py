"""This package's log in Ray's processes.

Importing vLLM's API server imports model-hosting-container-standards, which sets the root logger and its handlers to
errors alone, so that what is logged through the root logger is lost from then on.

The garbage collector in Ray's processes.

A full collection visits every object there is, a million of imported modules. That takes a second of an idle core and
several of a busy one, in which the process answers nobody: calls wait, hand-overs wait, finished samples wait.

What can start together, starts together: most of a start-up is one process at a time importing.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

NAME = __name__.partition(".")[0]


def show_log(level: str = "WARNING") -> None:
    """Show it as verl shows its own: on standard error, from VERL_LOGGING_LEVEL up. Again changes nothing."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    log = logging.getLogger(NAME)
    log.handlers, log.propagate = [handler], False
    log.setLevel(os.environ.get("VERL_LOGGING_LEVEL", level))


def freeze_imports() -> None:
    """Leave alone what this process has by now, in all later collections. Again adds what came since."""
    gc.collect()  # or what nothing needs would stay, too
    gc.freeze()


T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """One launch in a thread of its own; `result` waits for it and raises what it raised."""

    def __init__(self, name: str, launch: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        threading.Thread(target=self._run, args=(launch,), name=name, daemon=True).start()

    def _run(self, launch: Callable[[], T]) -> None:
        try:
            self.future.set_result(launch())
        except BaseException as error:  # handed to whoever asks for the result
            self.future.set_exception(error)

    def result(self, *_: Any, **__: Any) -> T:
        return self.future.result()
