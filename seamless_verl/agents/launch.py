"""The first code of a command's process: sets its limits, ties its life to its parent's, and executes the command.

    launch.py PARENT_PID [RLIMIT_NAME=VALUE ...] -- COMMAND ...

Between fork and exec in the parent this would copy its page tables, and could hang on a lock of another thread.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG = 1
NOT_FOUND, NOT_RUN = 127, 126  # the exit codes of shells


def main(arguments: list[str]) -> NoReturn:
    parent, cut = int(arguments[0]), arguments.index("--")
    reset_signals()
    die_with(parent)
    for name, _, value in (entry.partition("=") for entry in arguments[1:cut]):
        limit(getattr(resource, name), int(value))
    command = arguments[cut + 1 :]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, os.fsencode(f"cannot run {command[0]!r}: {error.strerror}\n"))
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN)


def reset_signals() -> None:
    """Signals that the parent or this interpreter ignores or blocks would stay so for the command."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError):  # signals that the C library reserves
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def die_with(parent: int) -> None:
    """Make Linux kill this process when the thread that started it ends, in whatever way."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before prctl was called
        os._exit(NOT_RUN)


def limit(which: int, value: int) -> None:
    """Set both limits; a lower hard limit stays. The soft limit of CPU time is a signal that can be handled."""
    hard = resource.getrlimit(which)[1]
    most = value if hard == resource.RLIM_INFINITY else min(value, hard)
    room = hard == resource.RLIM_INFINITY or most < hard
    resource.setrlimit(which, (most, most + 1 if which == resource.RLIMIT_CPU and room else most))


if __name__ == "__main__":
    main(sys.argv[1:])
