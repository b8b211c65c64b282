"""Where every thread and asyncio task of this process is."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from types import CoroutineType, FrameType
from typing import Any

WRAPPER = "coroutine_wrapper"  # CPython's type of a coroutine's `__await__()`


def stacks(loop: asyncio.AbstractEventLoop | None = None) -> str:
    """The stacks of all threads, each under its name, and of the tasks of `loop`; any thread may ask.

    The others go on meanwhile, so that a busy one is shown where it was at some moment.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: names.get(item[0], ""))
    threads = [
        _section(f"thread {names.get(i, 'unknown')} ({i})", traceback.format_stack(frame)) for i, frame in frames
    ]
    tasks = [] if loop is None else sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    return "\n".join([*threads, *map(_task, tasks)])


def _task(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    lines = [line for frame in _awaiting(coroutine) for line in traceback.format_stack(frame, limit=1)]
    name = getattr(coroutine, "__qualname__", repr(coroutine))
    return _section(f"task {task.get_name()} ({name})", lines or ["  it has no frame: it is over\n"])


def _awaiting(awaited: object) -> Iterator[FrameType]:
    """The frames of a suspended coroutine, from the outermost to where it waits; not into async generators."""
    while awaited is not None:
        prefix, below = ("cr", "cr_await") if hasattr(awaited, "cr_frame") else ("gi", "gi_yieldfrom")
        if (frame := getattr(awaited, f"{prefix}_frame", None)) is not None:
            yield frame
        awaited = getattr(awaited, below, None) or _wrapped(awaited)


def _wrapped(awaited: object) -> CoroutineType[Any, Any, Any] | None:
    """The coroutine of which this is `__await__()`: so Ray's compiled ones await what an actor's methods are.

    It has no attribute for that, but the garbage collector knows.
    """
    if type(awaited).__name__ != WRAPPER:
        return None
    return next((one for one in gc.get_referents(awaited) if isinstance(one, CoroutineType)), None)


def _section(title: str, lines: list[str]) -> str:
    return f"{title}\n{''.join(lines)}"
