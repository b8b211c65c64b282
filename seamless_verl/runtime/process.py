"""What each process of a run sets up, and how it reports itself: log, garbage collection, background tasks, stacks.

- Log: importing vLLM's API server imports model-hosting-container-standards, which sets the root logger and its
  handlers to errors alone. `show_log` gives this package a handler of its own, so that its warnings are not lost.
- Garbage collection: a full collection visits every object, a million of them of imported modules. That takes a second
  of an idle core and several of a busy one, in which the process answers no call. `freeze_imports` spares them.
- Background tasks: most of a start-up is one process at a time importing, so that independent launches run at once.
- A clock that stands still while its process does.
- Stack report: where every thread and asyncio task of this process is.
- A process without which this one is of no use: this one ends with it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from types import CoroutineType, FrameType
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)
PACKAGE = __name__.partition(".")[0]
BEAT_S = 1.0  # from a beat of the event loop to the next
LATE_S = 2.0  # after a beat without another one the clock stops
COROUTINE_WRAPPER = "coroutine_wrapper"  # CPython's type of a coroutine's `__await__()`


def show_log(level: str = "WARNING") -> None:
    """Show this package's log as verl shows its own: on standard error, from VERL_LOGGING_LEVEL up.

    May be called again.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s:%(asctime)s:%(message)s"))
    log = logging.getLogger(PACKAGE)
    log.handlers, log.propagate = [handler], False
    log.setLevel(os.environ.get("VERL_LOGGING_LEVEL", level))


def freeze_imports() -> None:
    """Exempt all objects that this process has now from later collections. A second call adds those made since."""
    gc.collect()  # or garbage would stay, too
    gc.freeze()
    gc.collect()  # of next to nothing: the collector waits for a quarter of what the last one went through


def end_with_process(pid: int) -> None:
    """From now on this process ends, at once and with code 1, when the process with this id has ended.

    Where the system gives out no handles of processes, it goes on by itself, and says so in the log.
    """
    try:
        other = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError as error:  # a kernel before 5.3, or a container that forbids it
        logger.warning("this process does not end with process %d: pidfd_open: %s", pid, error)
        return
    threading.Thread(target=_end_after, args=(other,), name=f"ends with process {pid}", daemon=True).start()


def _end_after(other: int) -> None:
    await_end(other)
    os._exit(1)


def await_end(process: int) -> None:
    """Returns when the process of this handle, a pidfd, has ended; closes the handle."""
    ends = select.poll()  # `select` takes no descriptor above 1023
    ends.register(process, select.POLLIN)
    ends.poll()
    os.close(process)


T = TypeVar("T")


class BackgroundTask(Generic[T]):
    """One call of `launch` in a thread of its own; `result` waits for it, and raises what it raised."""

    def __init__(self, name: str, launch: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        threading.Thread(target=self._run, args=(launch,), name=name, daemon=True).start()

    def _run(self, launch: Callable[[], T]) -> None:
        try:
            self.future.set_result(launch())
        except BaseException as error:  # raised where the result is asked for
            self.future.set_exception(error)

    def result(self, *_: Any, **__: Any) -> T:
        return self.future.result()


class WholeWork:
    """Work of an event loop that is done whole, also when who waits for it is cancelled, and cancelled again."""

    def __init__(self) -> None:
        self._working: set[asyncio.Future[Any]] = set()

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. A caller that is cancelled leaves at once, and the work goes on."""
        task = asyncio.ensure_future(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return await asyncio.shield(task)

    async def ended(self) -> None:
        """Returns when all that is being done now has ended; its errors are its callers'."""
        if self._working:
            await asyncio.wait(self._working)


class AwakeTime:
    """Seconds in which an event loop ran, from `now`, a monotonic clock; it runs while `beat` is called often enough.

    Deadlines for signs of life of others must not pass while nobody here can hear them: a process that was stopped,
    starved or swapped out finds all of them over while the signs themselves still wait in its sockets.

    It never goes back, and loses nothing while beats are at most `late_s` seconds apart, `LATE_S` by default.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic, late_s: float | None = None) -> None:
        self._now, self._last = now, now()
        self._awake_s = self._last  # its value at the last beat
        self._late_s = LATE_S if late_s is None else late_s

    def __call__(self) -> float:
        return self._at(self._now())

    def beat(self) -> None:
        """The process is awake: what is more than `late_s` since the last beat does not count."""
        now = self._now()
        self._awake_s, self._last = self._at(now), now

    def _at(self, now: float) -> float:
        return self._awake_s + min(now - self._last, self._late_s)

    async def run(self) -> None:
        """Beats until it is cancelled."""
        self.beat()
        while True:
            await asyncio.sleep(BEAT_S)
            self.beat()


def stack_report(loop: asyncio.AbstractEventLoop | None = None) -> str:
    """The stacks of all threads, each under its name, and of the tasks of `loop`. Any thread may call it.

    The other threads run on meanwhile: a busy one is shown where it was at some moment.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: names.get(item[0], ""))
    threads = [
        _section(f"thread {names.get(i, 'unknown')} ({i})", traceback.format_stack(frame)) for i, frame in frames
    ]
    tasks = [] if loop is None else sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    return "\n".join([*threads, *map(_task_section, tasks)])


def own_stacks(actor: Any) -> str:
    """The stack report of the process of an actor, of any class, that is called with this function."""
    try:
        return stack_report(asyncio.get_running_loop())
    except RuntimeError:  # it has no event loop
        return stack_report()


def _task_section(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    lines = [line for frame in _await_chain(coroutine) for line in traceback.format_stack(frame, limit=1)]
    name = getattr(coroutine, "__qualname__", repr(coroutine))
    return _section(f"task {task.get_name()} ({name})", lines or ["  it has no frame: it has ended\n"])


def _await_chain(awaited: object) -> Iterator[FrameType]:
    """The frames of a suspended coroutine, from the outermost to where it waits; not into async generators."""
    while awaited is not None:
        prefix, below = ("cr", "cr_await") if hasattr(awaited, "cr_frame") else ("gi", "gi_yieldfrom")
        if (frame := getattr(awaited, f"{prefix}_frame", None)) is not None:
            yield frame
        awaited = getattr(awaited, below, None) or _wrapped_coroutine(awaited)


def _wrapped_coroutine(awaited: object) -> CoroutineType[Any, Any, Any] | None:
    """The coroutine of which this is `__await__()`, as Ray's compiled coroutines await an actor's methods.

    The wrapper has no attribute for it, but the garbage collector knows its referents.
    """
    if type(awaited).__name__ != COROUTINE_WRAPPER:
        return None
    referents = gc.get_referents(awaited)
    return next((referent for referent in referents if isinstance(referent, CoroutineType)), None)


def _section(title: str, lines: list[str]) -> str:
    return f"{title}\n{''.join(lines)}"
