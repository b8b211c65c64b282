"""The gateway's listening sockets: at the node's address, for agents on other machines, and at the loopback address."""

from __future__ import annotations

import socket

BACKLOG = 2048
LOOPBACK = "127.0.0.1"
COVERING = frozenset({LOOPBACK, "localhost", "0.0.0.0", ""})
"""Hosts that are the loopback address, or have it among them."""

TRIES = 16  # for a port that is free at both addresses


def open_listeners(host: str, port: int = 0) -> list[socket.socket]:
    """Sockets that listen at `host` and at the loopback address, on one port; `port` 0 takes any that is free.

    Raises:
        OSError: the port is taken, or `host` is no address of this machine.
    """
    tries = TRIES
    while True:
        first = socket.create_server((host, port), backlog=BACKLOG)
        if host in COVERING:
            return [first]
        try:
            return [first, socket.create_server((LOOPBACK, first.getsockname()[1]), backlog=BACKLOG)]
        except OSError:  # another program has this port at the other address
            first.close()
            tries -= 1
            if port or not tries:
                raise
