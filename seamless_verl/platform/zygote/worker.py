"""From a fork of the zygote to the process that Ray asked for."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from launcher import NUMBER, receive

PATIENCE_S = 5.0  # a launcher says all it has to say at once; while it does, no other is served


@dataclass(frozen=True)
class Request:
    """What a launcher was started with: arguments, environment, folder, niceness, and its standard descriptors."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    nice: int
    descriptors: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> Request:
        """What the launcher at the other end asks for; raises OSError, ValueError or struct.error for less."""
        connection.settimeout(PATIENCE_S)
        length, descriptors, _, _ = socket.recv_fds(connection, NUMBER.size, 3)
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


def become(request: Request, sockets: Iterable[socket.socket]) -> NoReturn:
    """Be that process: run its script to the end, and end. `sockets` are the zygote's own."""
    try:
        for each in sockets:
            each.close()
        take_over(request)
        runpy.run_path(sys.argv[0], run_name="__main__")
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
    """Descriptors, session, signals, folder, environment, niceness, arguments, and randomness of one's own."""
    for number, descriptor in enumerate(request.descriptors):
        os.dup2(descriptor, number)
    request.close()
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(request.env)
    os.nice(max(0, request.nice - os.nice(0)))
    sys.argv = request.argv
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    extra = request.env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in extra if path and path not in sys.path]
    if "numpy" in sys.modules:  # the others reseed themselves after a fork
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "big"))
