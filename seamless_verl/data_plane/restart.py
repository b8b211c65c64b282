"""What an actor needs after its restart, kept in Ray's own store, which outlives the actor.

The listening socket of a gateway, kept open while the gateway is down.

Whoever connects meanwhile waits in the socket's queue until a gateway takes the connections again, so that the
first retry of an SDK succeeds: it takes longer, and that is all.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.experimental import internal_kv

SPACE = "seamless_verl"


class StateStore:
    """One value under the name of its owner, in this job."""

    def __init__(self, name: str) -> None:
        self.key = f"{ray.get_runtime_context().get_job_id()}:{name}"

    def put(self, value: Any) -> None:
        """Kept when this returns; actor handles may be in it."""
        internal_kv._internal_kv_put(self.key, cloudpickle.dumps(value), overwrite=True, namespace=SPACE)

    def get(self) -> Any:
        """The last value that was put; None before the first."""
        raw = internal_kv._internal_kv_get(self.key, namespace=SPACE)
        return None if raw is None else cloudpickle.loads(raw)

    def clear(self) -> None:
        internal_kv._internal_kv_del(self.key, namespace=SPACE)


BACKLOG = 2048
LENT_S = 10.0  # both ends are on one host


class SocketHolder:
    """An actor beside the gateway's, which does nothing else and so has nothing to die of.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int) -> None:
        self.socket = socket.create_server((ray.util.get_node_ip_address(), port), backlog=BACKLOG)

    def address(self) -> tuple[str, int]:
        host, port = self.socket.getsockname()[:2]
        return host, port

    def lend(self, path: str) -> None:
        """Give a copy of the socket to whoever listens at this path."""
        with socket.socket(socket.AF_UNIX) as way:
            way.settimeout(LENT_S)
            way.connect(path)
            socket.send_fds(way, [b"."], [self.socket.fileno()])


async def borrowed(doorstep: str) -> socket.socket | None:
    """The socket of the doorstep of this name; None when the doorstep is dead, and its address free."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as here:
        path = str(Path(folder, "door"))  # a folder that only this user may enter
        here.bind(path)
        here.listen(1)
        here.settimeout(LENT_S)
        try:
            await ray.get_actor(doorstep).lend.remote(path)
        except (ray.exceptions.RayActorError, ValueError):  # Ray has no actor of this name any more
            return None
        return await asyncio.to_thread(_received, here)


def _received(here: socket.socket) -> socket.socket:
    way, _ = here.accept()
    with way:
        way.settimeout(LENT_S)
        _, (number, *_), _, _ = socket.recv_fds(way, 1, 1)
    return socket.socket(fileno=number)
