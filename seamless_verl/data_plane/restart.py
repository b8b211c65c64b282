"""State that outlives a data plane's actor: its values in Ray's store, and the gateway's listening socket.

The socket stays open while the gateway is down. A client that connects meanwhile waits in the socket's queue until a
gateway accepts connections again, so that the first retry of an SDK succeeds after a longer wait.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.experimental import internal_kv

from seamless_verl.gateway.http import open_listeners
from seamless_verl.runtime.actor_death import ACTOR_GONE

NAMESPACE = "seamless_verl"
MAX_SOCKETS = 2  # at the node's address, and at the loopback address
TRANSFER_S = 10.0  # both ends of a socket's transfer are on one host


class StateStore:
    """One value under its owner's name, in this job, in Ray's key-value store.

    Its owner has one event loop for everything, and Ray's store may not answer for a minute, as while it is started
    again. So a thread writes, one value after another.
    """

    def __init__(self, name: str) -> None:
        self.key = f"{ray.get_runtime_context().get_job_id()}:{name}"
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"state of {name}")
        self._cleared = False

    async def put(self, value: Any) -> None:
        """Stores the value as it is now, which may hold actor handles; it is stored when this returns.

        One of a task that is cancelled may be left out; a later one is stored after it. After `clear` none is.
        """
        if self._cleared:
            return
        put = partial(internal_kv._internal_kv_put, overwrite=True, namespace=NAMESPACE)
        await asyncio.get_running_loop().run_in_executor(self._writer, put, self.key, cloudpickle.dumps(value))

    def get(self) -> Any:
        """The last value that was put; None before the first."""
        raw = internal_kv._internal_kv_get(self.key, namespace=NAMESPACE)
        return None if raw is None else cloudpickle.loads(raw)

    async def clear(self) -> None:
        """Nothing is stored any more, also not what was to be stored before. A second call changes nothing."""
        if self._cleared:
            return
        self._cleared = True
        delete = partial(internal_kv._internal_kv_del, namespace=NAMESPACE)
        await asyncio.get_running_loop().run_in_executor(self._writer, delete, self.key)
        self._writer.shutdown(wait=False)


class SocketHolder:
    """An actor that holds the gateway's listening sockets and does nothing else, so that it outlives the gateway.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, port: int) -> None:
        self.sockets = open_listeners(ray.util.get_node_ip_address(), port)

    def address(self) -> tuple[str, int]:
        host, port = self.sockets[0].getsockname()[:2]
        return host, port

    def send_copies(self, path: str) -> None:
        """Sends copies of the sockets to the process that listens at this path."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TRANSFER_S)
            connection.connect(path)
            socket.send_fds(connection, [b"."], [held.fileno() for held in self.sockets])


async def held_sockets(holder: str) -> list[socket.socket]:
    """Copies of the sockets of this holder; none if the holder is dead, which frees its address."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as receiver:
        path = str(Path(folder, "socket"))  # a folder that only this user may enter
        receiver.bind(path)
        receiver.listen(1)
        receiver.settimeout(TRANSFER_S)
        try:
            await ray.get_actor(holder).send_copies.remote(path)
        except (*ACTOR_GONE, ValueError):  # Ray has no actor of this name any more
            return []
        return await asyncio.to_thread(_receive_sockets, receiver)


def _receive_sockets(receiver: socket.socket) -> list[socket.socket]:
    connection, _ = receiver.accept()
    with connection:
        connection.settimeout(TRANSFER_S)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, MAX_SOCKETS)
    return [socket.socket(fileno=descriptor) for descriptor in descriptors]
