"""The console of a run: lines that come there whatever becomes of Ray's log monitor.

Ray shows what workers print by a process that reads their logs, and by messages of its GCS. Neither comes back when the
process dies, when the GCS is started again, or when a worker prints more in one line than a message takes. So lines
that a user follows a run by come through a pipe beside the run file, which the command itself reads.

`say` is for what a command writes when it ends: a console that is closed or full keeps it from nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import PIPE_BUF
from typing import IO, TextIO

RUN_FILE = "SEAMLESS_RUN_FILE"  # names the file in which a run registers with its supervisor
PIPE = "console"  # beside the run file
LAST_LINES_S = 5.0  # for a console that takes nothing more


def say(line: str) -> None:
    """Write a line to standard error."""
    _write(sys.stderr, f"{line}\n")


def show_line(line: str) -> None:
    """Write a line to the console of the run that this process belongs to; it may be an actor of the run.

    A console that takes no more, since nobody reads it, loses the line.
    """
    try:
        pipe = os.open(pipe_of_run(), os.O_WRONLY | os.O_NONBLOCK)
    except (OSError, LookupError):  # there is none: the command is on another machine, or has ended
        _write(sys.stdout, f"{line}\n")
        return
    with suppress(OSError), os.fdopen(pipe, "wb", buffering=0) as file:
        file.write(line.encode()[: PIPE_BUF - 1] + b"\n")  # whole, or not at all


@contextmanager
def lines_shown() -> Iterator[None]:
    """In the block, this process writes what `show_line` is given to its standard output."""
    try:
        os.mkfifo(path := pipe_of_run())
    except (OSError, LookupError):  # a file system without pipes, or a command without a supervisor
        yield
        return
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # it would wait for a writer
    writer = os.open(path, os.O_WRONLY)  # while there is one, the pipe has no end
    os.set_blocking(reader, True)
    thread = threading.Thread(target=_show, args=(os.fdopen(reader, errors="replace"),), name="console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(writer)
        thread.join(LAST_LINES_S)


def _show(lines: IO[str]) -> None:
    with lines:
        for line in lines:
            _write(sys.stdout, line)


def pipe_of_run() -> Path:
    """Raises KeyError in a process without a run file."""
    return Path(os.environ[RUN_FILE]).with_name(PIPE)


def _write(stream: TextIO | None, text: str) -> None:
    with suppress(OSError, ValueError):  # it is closed, or its disk is full
        if stream is not None:  # its descriptor was closed when python started
            stream.write(text)
            stream.flush()
