"""Worker: turns a fork of the forkserver into the process that a launcher asked for.

What such a process spawns in its turn, as a vLLM server its engine, is a fork of the forkserver too: multiprocessing's
command for it is given to a launcher.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import gc
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import spawn
from types import ModuleType
from typing import Any, NoReturn

import launcher
from launcher import INTEGER, receive

RECEIVE_TIMEOUT_S = 5.0  # a launcher sends its whole request at once; while it does, no other is served
MAX_DESCRIPTORS = 253  # that one message takes
IDS_PER_FORK = 256  # that a worker may draw by itself; Ray derives nearly all of its ids from others
Command = Callable[..., list[Any]]


@dataclass(frozen=True)
class ForkRequest:
    """What a launcher was started with; `descriptors` are to get the given `numbers`."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    nice: int
    cores: list[int]
    numbers: list[int]
    descriptors: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> ForkRequest:
        """Read a launcher's request; raises OSError, ValueError or struct.error for an incomplete one."""
        connection.settimeout(RECEIVE_TIMEOUT_S)
        length, descriptors, _, _ = socket.recv_fds(connection, INTEGER.size, MAX_DESCRIPTORS)
        try:
            body: dict[str, Any] = json.loads(receive(connection, INTEGER.unpack(length)[0]))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        connection.settimeout(None)
        return cls(**body, descriptors=descriptors)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def run_request(request: ForkRequest, fork_number: int, server_descriptors: Iterable[int]) -> NoReturn:
    """In the fork: run the requested script to its end, then end the process.

    `server_descriptors` are the forkserver's own; `fork_number` counts its forks from 1.
    """
    try:
        for descriptor in server_descriptors:
            os.close(descriptor)
        gc.enable()
        apply_request(request)
        separate_random_state(fork_number)
        spawn.get_command_line = through_launcher(spawn.get_command_line)
        run_script(request.argv)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # and nothing after them: below us on the stack is the forkserver
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def apply_request(request: ForkRequest) -> None:
    """Take the request's descriptors, folder, environment, niceness and cores, a session and usual signals."""
    install_descriptors(request.descriptors, request.numbers)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    tempfile.tempdir = None  # an imported module may have cached it, with another TMPDIR
    os.nice(max(0, request.nice - os.nice(0)))
    os.sched_setaffinity(0, request.cores)


def separate_random_state(fork_number: int) -> None:
    """Give this fork random numbers of its own where a generator does not reseed itself after a fork.

    Ray draws an id from one generator of its C++ while it is imported, and all forks would draw the same ids next. Two
    that start at once would have the same object in the node's store, at which Ray's worker ends itself. Nothing
    seeds that generator, so each fork skips the ids of the forks before it.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "big"))
    if (ray := sys.modules.get("ray._raylet")) is not None:
        for _ in range(fork_number * IDS_PER_FORK):
            ray.UniqueID.from_random()


def install_descriptors(descriptors: list[int], numbers: list[int]) -> None:
    """Give the descriptors these numbers. They are moved past the largest first: one may have another's number."""
    above = max(numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def run_script(arguments: list[str]) -> None:
    """What the interpreter does with `<script> <arguments>`, or with `<options> -c <code> <arguments>`.

    Options are left out: they are those of the forkserver, from which the process that gives them was forked.
    """
    if not arguments[0].startswith("-"):
        set_argv_and_path(arguments, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
        return
    at = arguments.index("-c")
    set_argv_and_path(["-c", *arguments[at + 2 :]], "")
    sys.modules["__main__"] = ModuleType("__main__")
    exec(arguments[at + 1], vars(sys.modules["__main__"]))


def set_argv_and_path(argv: list[str], folder: str) -> None:
    sys.argv = argv
    sys.path[0] = folder
    extra = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in extra if path and path not in sys.path]


def through_launcher(command_line: Command) -> Command:
    """multiprocessing's command for a spawned process, given to a launcher unless its interpreter is another."""

    @functools.wraps(command_line)
    def command(**kwds: Any) -> list[Any]:
        executable, *arguments = command_line(**kwds)
        if os.fsdecode(executable) != sys.executable:
            return [executable, *arguments]
        return [executable, "-IS", launcher.__file__, *arguments]

    return command
