"""The listening socket of a gateway, kept open while the gateway is down.

Whoever connects meanwhile waits in the socket's queue until a gateway takes the connections again, so that the
first retry of an SDK succeeds: it takes longer, and that is all.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from pathlib import Path

import ray

BACKLOG = 2048
LENT_S = 10.0  # both ends are on one host


class Doorstep:
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
