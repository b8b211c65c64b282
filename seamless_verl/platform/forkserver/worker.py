"""From a fork of the zygote to the process that was asked for.

What such a process spawns in its turn, as a vLLM server its engine, is a fork of the zygote too:
multiprocessing's command for it is given to a launcher.
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
from launcher import NUMBER, receive

PATIENCE_S = 5.0  # a launcher says all it has to say at once; while it does, no other is served
MOST_DESCRIPTORS = 253  # that one message takes
IDS = 256  # that a worker may draw by itself; Ray derives nearly all of its ids from others
Command = Callable[..., list[Any]]


@dataclass(frozen=True)
class Request:
    """What a launcher was started with; `descriptors` are to become those with its `numbers`."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    nice: int
    cores: list[int]
    numbers: list[int]
    descriptors: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> Request:
        """What the launcher at the other end asks for; raises OSError, ValueError or struct.error for less."""
        connection.settimeout(PATIENCE_S)
        length, descriptors, _, _ = socket.recv_fds(connection, NUMBER.size, MOST_DESCRIPTORS)
        try:
            body: dict[str, Any] = json.loads(receive(connection, NUMBER.unpack(length)[0]))
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        connection.settimeout(None)
        return cls(**body, descriptors=descriptors)

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def become(request: Request, number: int, own: Iterable[int]) -> NoReturn:
    """Be that process: run its script to the end, and end. `own` are the zygote's descriptors, of whose forks this is
    the one of this `number`."""
    try:
        for each in own:
            os.close(each)
        gc.enable()
        take_over(request)
        differ(number)
        spawn.get_command_line = through_launcher(spawn.get_command_line)
        run(request.argv)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # and then no more: below us on the stack is the zygote
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def take_over(request: Request) -> None:
    """Descriptors, session, signals, folder, environment, niceness and cores of one's own."""
    install(request.descriptors, request.numbers)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    tempfile.tempdir = None  # whatever was imported may have asked for it, with another TMPDIR
    os.nice(max(0, request.nice - os.nice(0)))
    os.sched_setaffinity(0, request.cores)


def differ(number: int) -> None:
    """Have random numbers of one's own, from those that do not reseed themselves after a fork.

    Ray draws an id from one generator of its C++ while it is imported, and all forks would go on with the same ids: two
    that start at once would have the same object in the node's store, at which Ray's worker ends itself. Nothing
    seeds that generator, so each fork goes past those of the forks before it.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "big"))
    if (ray := sys.modules.get("ray._raylet")) is not None:
        for _ in range(number * IDS):
            ray.UniqueID.from_random()


def install(descriptors: list[int], numbers: list[int]) -> None:
    """Give the descriptors these numbers; they go past the largest first, for one may have another's number."""
    above = max(numbers) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def run(arguments: list[str]) -> None:
    """What the interpreter does with `<script> <arguments>`, or with `<options> -c <code> <arguments>`.

    Options are left out: they are those of the zygote, from which the process that gives them was forked.
    """
    if not arguments[0].startswith("-"):
        name_arguments(arguments, os.path.dirname(os.path.abspath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
        return
    at = arguments.index("-c")
    name_arguments(["-c", *arguments[at + 2 :]], "")
    sys.modules["__main__"] = ModuleType("__main__")
    exec(arguments[at + 1], vars(sys.modules["__main__"]))


def name_arguments(argv: list[str], folder: str) -> None:
    sys.argv = argv
    sys.path[0] = folder
    extra = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in extra if path and path not in sys.path]


def through_launcher(command_line: Command) -> Command:
    """multiprocessing's command for a process that it spawns, given to a launcher unless its interpreter is another."""

    @functools.wraps(command_line)
    def command(**kwds: Any) -> list[Any]:
        executable, *arguments = command_line(**kwds)
        if os.fsdecode(executable) != sys.executable:
            return [executable, *arguments]
        return [executable, "-IS", launcher.__file__, *arguments]

    return command
