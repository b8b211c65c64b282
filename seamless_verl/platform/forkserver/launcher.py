"""Stands where a worker's process is expected: has the zygote fork the worker, and lives as long as it.

Run as `python -IS launcher.py <arguments of the interpreter>`, once for every worker, so that it imports
next to nothing, and nothing of this package. The zygote listens on an abstract socket, one for each Ray
node, bound by the first launcher there: not earlier, because Ray reads its environment as it is
imported, and only a worker's has all of it. An abstract socket has no owner, so that either end asks
the kernel who the other is, and talks to its own user alone. Without a zygote the launcher becomes
the worker itself. Neither outlives the other: the zygote ends the worker of a launcher that was killed,
and a launcher whose zygote was, its worker. Until then it keeps the descriptors it was given, since to
whoever started it the end of a pipe means the end of the process.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

NODE = "RAY_RAYLET_PID"  # set by Ray in its workers
ADDRESS = "SEAMLESS_ZYGOTE"  # names another socket
NUMBER = struct.Struct("!I")  # on the wire: a length, a process id, an exit code
PEER = struct.Struct("3i")  # process, user and group, as SO_PEERCRED gives them
PATIENCE_S = 240.0  # for a fork: the imports come first, and take a minute where nothing is in the page cache
LISTENS_WITHIN_S = 1.0  # another launcher has bound its socket, and listens next


def address(environ: Mapping[str, str]) -> str:
    """The socket of this worker's zygote: of its user, its container and its Ray node."""
    container = os.stat("/proc/self/ns/mnt").st_ino
    node = environ.get(NODE, os.getppid())
    return "\0" + environ.get(ADDRESS, f"seamless-zygote-{os.getuid()}-{container}-{node}")


def check_peer(connection: socket.socket) -> None:
    """Raises PermissionError unless the other end is of our own user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    _, user, _ = PEER.unpack(data)
    if user != os.getuid():
        raise PermissionError(f"the other end belongs to user {user}")


def start_zygote(name: str, owner: int, modules: Sequence[str] = ()) -> bool:
    """Start one on this socket, for as long as the process `owner` lives; False when there is one."""
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(name)
        except OSError:
            return False
        server.listen(256)
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "server.py")
        command = [sys.executable, script, str(server.fileno()), str(owner), *modules]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(command, pass_fds=[server.fileno()], start_new_session=True, **quiet)  # outlives our pipes
    return True


def inherited() -> list[int]:
    """The descriptors this process was started with; to be asked before it opens any."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return sorted(number for number in found if is_open(number))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:  # that of the listing itself
        return False
    return True


def ask(name: str, argv: Sequence[str], numbers: Sequence[int] = (0, 1, 2)) -> tuple[socket.socket, int]:
    """Have a worker forked, which gets the descriptors of these numbers.

    Returns the connection, on which its exit code will come, and its process id.

    Raises:
        OSError: there is no zygote, it went away, or there are more descriptors than a message takes.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(PATIENCE_S)
    connect(connection, name)
    check_peer(connection)
    request = {
        "argv": argv,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "nice": os.nice(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "numbers": numbers,
    }
    body = json.dumps(request).encode()
    ours = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))]
    connection.sendmsg([NUMBER.pack(len(body))], ours)
    connection.sendall(body)
    worker = receive_number(connection)
    connection.settimeout(None)
    return connection, worker


def connect(connection: socket.socket, name: str) -> None:
    deadline = time.monotonic() + LISTENS_WITHIN_S
    while True:
        try:
            return connection.connect(name)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)  # an address that nobody listens at yet has nothing to wait on


def receive_number(connection: socket.socket) -> int:
    return int(NUMBER.unpack(receive(connection, NUMBER.size))[0])


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the other end has gone")
        data += part
    return data


def main() -> int:
    numbers, name, owner = inherited(), address(os.environ), int(os.environ.get(NODE, os.getppid()))
    try:
        start_zygote(name, owner)
        connection, worker = ask(name, sys.argv[1:], numbers)
    except OSError as error:
        if not os.path.exists(f"/proc/{owner}"):
            return 1  # the node went, and nobody waits for this worker
        sys.stderr.write(f"no zygote ({error}): this worker imports everything by itself\n")
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(worker, number))
    try:
        return receive_number(connection)
    except ConnectionError:  # the zygote went, with its node
        os.kill(worker, signal.SIGKILL)
        raise


if __name__ == "__main__":
    sys.exit(main())
