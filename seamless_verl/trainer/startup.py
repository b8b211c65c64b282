"""What can start together, starts together: most of a start-up is one process at a time importing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Concurrently(Generic[T]):
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
