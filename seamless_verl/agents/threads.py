"""Blocking work beside the event loop, one thread for each piece.

A pool would let agents that block starve the clearing up of those that ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], *, daemon: bool) -> asyncio.Future[T]:
    """Run `work` in a thread of its own; the future has its value or its exception.

    Cancelling the future abandons the thread, it does not stop it. The interpreter's exit waits for the
    thread unless it is a `daemon`. StopIteration and TimeoutError come as the cause of a RuntimeError.
    """
    promise: concurrent.futures.Future[T] = concurrent.futures.Future()
    promise.set_running_or_notify_cancel()

    def body() -> None:
        try:
            promise.set_result(work())
        except (StopIteration, TimeoutError) as error:  # a future carries neither as it is
            wrapped = RuntimeError(repr(error))
            wrapped.__cause__ = error
            promise.set_exception(wrapped)
        except BaseException as error:  # carried to who waits, also a SystemExit
            promise.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(body,), daemon=daemon).start()
    return asyncio.wrap_future(promise)


async def to_the_end(work: asyncio.Future[T]) -> T:
    """Wait for `work` however often the caller is cancelled meanwhile; only then is the cancellation raised."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # heard; the cancellation goes first
        raise cancelled
    return work.result()
