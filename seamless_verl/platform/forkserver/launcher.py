"""Launcher: the process that Ray or multiprocessing starts as a worker. It has the forkserver fork the worker.

Run as `python -IS launcher.py <arguments of the interpreter>`, once for every worker, so that it imports next to
nothing, and nothing of this package.

The forkserver listens on an abstract socket, one for each Ray node. The first launcher of the node binds it: not
earlier, because Ray reads its environment as it is imported, and only a worker's environment is complete. An abstract
socket has no owner, so each end asks the kernel for the other's user, and talks to its own user alone. Without a
forkserver the launcher becomes the worker itself.

Invariants: neither launcher nor worker outlives the other. The forkserver kills the worker of a launcher that was
killed; a launcher whose forkserver was killed kills its worker. Until then the launcher keeps the descriptors it was
given, since the process that started it takes the end of a pipe for the end of the worker.
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
from collections.abc import Mapping, MutableMapping, Sequence

NODE = "RAY_RAYLET_PID"  # set by Ray in its workers
PYTHON, LAUNCHER = "SEAMLESS_PYTHON", "SEAMLESS_LAUNCHER"  # as config/platform/cpu.yaml uses them
REGISTER_S = "RAY_worker_register_timeout_seconds"  # Ray's, by default 60: it kills a worker that is not up by then
ADDRESS = "SEAMLESS_FORKSERVER"  # names another socket
INTEGER = struct.Struct("!I")  # on the wire: a length, a process id, an exit code
PEER = struct.Struct("3i")  # process, user and group, as SO_PEERCRED gives them
FORK_TIMEOUT_S = 240.0  # the imports come first, and take a minute where nothing is in the page cache
LISTEN_TIMEOUT_S = 1.0  # another launcher has bound its socket, and listens next


def set_worker_command(environ: MutableMapping[str, str]) -> None:
    """Set the variables from which config/platform/cpu.yaml makes `runtime_env.py_executable`; children inherit them.

    Ray must also wait for a worker for longer than the worker's launcher waits for the forkserver.
    """
    environ.setdefault(PYTHON, sys.executable)
    environ.setdefault(LAUNCHER, os.path.realpath(__file__))
    environ.setdefault(REGISTER_S, str(int(2 * FORK_TIMEOUT_S)))


def socket_address(environ: Mapping[str, str]) -> str:
    """The socket of this worker's forkserver: of its user, its container and its Ray node."""
    container = os.stat("/proc/self/ns/mnt").st_ino
    node = environ.get(NODE, os.getppid())
    return "\0" + environ.get(ADDRESS, f"seamless-forkserver-{os.getuid()}-{container}-{node}")


def check_peer(connection: socket.socket) -> None:
    """Raise PermissionError unless the other end is of our own user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
    _, user, _ = PEER.unpack(data)
    if user != os.getuid():
        raise PermissionError(f"the other end belongs to user {user}")


def start_forkserver(address: str, owner: int, modules: Sequence[str] = ()) -> bool:
    """Start one on this socket, for as long as the process `owner` lives; False when there is one."""
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.bind(address)
        except OSError:
            return False
        server.listen(256)
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "server.py")
        command = [sys.executable, script, str(server.fileno()), str(owner), *modules]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(command, pass_fds=[server.fileno()], start_new_session=True, **quiet)  # outlives our pipes
    return True


def inherited_descriptors() -> list[int]:
    """The descriptors this process was started with; to be called before it opens any."""
    listed = [int(name) for name in os.listdir("/proc/self/fd")]
    return sorted(descriptor for descriptor in listed if is_open(descriptor))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:  # that of the listing itself
        return False
    return True


def request_fork(
    address: str, argv: Sequence[str], descriptors: Sequence[int] = (0, 1, 2)
) -> tuple[socket.socket, int]:
    """Have a worker forked, which gets these descriptors under the same numbers.

    Returns the connection, on which its exit code will come, and its process id.

    Raises:
        OSError: there is no forkserver, it went away, or there are more descriptors than a message takes.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(FORK_TIMEOUT_S)
    connect(connection, address)
    check_peer(connection)
    request = {
        "argv": argv,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "nice": os.nice(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "numbers": descriptors,
    }
    body = json.dumps(request).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    connection.sendmsg([INTEGER.pack(len(body))], rights)
    connection.sendall(body)
    worker = receive_integer(connection)
    connection.settimeout(None)
    return connection, worker


def connect(connection: socket.socket, address: str) -> None:
    deadline = time.monotonic() + LISTEN_TIMEOUT_S
    while True:
        try:
            return connection.connect(address)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)  # an address that nobody listens at yet has nothing to wait on


def receive_integer(connection: socket.socket) -> int:
    return int(INTEGER.unpack(receive(connection, INTEGER.size))[0])


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the other end has gone")
        data += part
    return data


def main() -> int:
    descriptors = inherited_descriptors()
    address, owner = socket_address(os.environ), int(os.environ.get(NODE, os.getppid()))
    try:
        start_forkserver(address, owner)
        connection, worker = request_fork(address, sys.argv[1:], descriptors)
    except OSError as error:
        if not os.path.exists(f"/proc/{owner}"):
            return 1  # the node went, and nobody waits for this worker
        sys.stderr.write(f"no forkserver ({error}): this worker imports everything by itself\n")
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(worker, number))
    try:
        return receive_integer(connection)
    except ConnectionError:  # the forkserver went, with its node
        os.kill(worker, signal.SIGKILL)
        raise


if __name__ == "__main__":
    sys.exit(main())
