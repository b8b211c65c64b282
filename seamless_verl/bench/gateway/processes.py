"""The processes of a run: where each is pinned, how they are started, and that they end with the run.

Invariants:
- The client and the stub engine share the first core; what is measured has the second to itself. Every arm is
  measured from the same places, so that what the client and the engine take from each other is in all of them.
- A child ends when its standard input closes: with the run, however that ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any

import uvloop

STOP_S = 10.0
SERVING = "serving on"


def cores() -> tuple[set[int], set[int]]:
    """(the client's and the engine's, the one of what is measured); both the same on a machine with one core."""
    allowed = sorted(os.sched_getaffinity(0))
    return {allowed[0]}, {allowed[1] if len(allowed) > 1 else allowed[0]}


def run(work: Coroutine[Any, Any, None]) -> None:
    """A process of ours: on the loop that Ray's actors have, too."""
    uvloop.run(work)


async def child() -> None:
    """Returns when whoever started this process closes its standard input, or is gone."""
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Reader(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            closed.set()

    await loop.connect_read_pipe(Reader, sys.stdin)
    await closed.wait()


@contextmanager
def started(
    command: Sequence[str], *, pinned: set[int], env: Mapping[str, str] | None = None, log: IO[str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A child on these cores, ended when the block is left. Somebody else's writes to `log`, and is just killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log or subprocess.PIPE,
        stderr=log and subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
        preexec_fn=_pinning(pinned),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def say(*ports: int) -> None:
    """A child tells where it serves."""
    sys.stdout.write(f"{SERVING} {' '.join(map(str, ports))}\n")
    sys.stdout.flush()


def said(process: subprocess.Popen[str]) -> list[int]:
    """The ports of a child that serves; raises RuntimeError when it ended before."""
    assert process.stdout is not None
    for line in process.stdout:  # libraries may write there, too
        if line.startswith(SERVING):
            return [int(port) for port in line.removeprefix(SERVING).split()]
    raise RuntimeError(f"{process.args!r} ended before it served; what it wrote is above")


def _pinning(to: set[int]) -> Callable[[], None]:
    return lambda: os.sched_setaffinity(0, to)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(STOP_S if process.stdout else 0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
