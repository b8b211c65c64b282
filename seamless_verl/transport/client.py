"""The gateway's end: a replica behind a connection, as an engine.

Invariants:
- A call has an inbox from before its request is sent until it has ended or was left; then it is told to nobody.
- When the connection is lost every inbox first gives what had arrived, and then raises ReplicaLostError.
- What waits for a reader that fell behind comes as one delta where it is of one version, so that what it costs to
  take falls with how far behind it is.

Nothing slows the server down for one client that reads slowly, since that would stop all calls of the connection;
what waits in an inbox is bounded by its call's token budget, 8 bytes a token and what it asked for on top.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import count
from typing import Any

from seamless_verl.errors import ReplicaLostError, WireError
from seamless_verl.rollout.engine import Delta, EngineRequest, joined
from seamless_verl.transport.codec import PROTOCOL, MessageKind, read_delta, request_message
from seamless_verl.transport.connection import Connection

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a host that vanished is noticed in 25 s


class RemoteEngine:
    """A replica's engine over a connection; `connect` makes one."""

    def __init__(self, replica_id: str, link: _ClientLink) -> None:
        self.replica_id = replica_id
        self._link = link

    @classmethod
    async def connect(
        cls,
        host: str,
        port: int,
        *,
        token: str,
        replica_id: str,
        on_lost: Callable[[str], None] | None = None,
        timeout_s: float = 10.0,
    ) -> RemoteEngine:
        """Connects and greets; `on_lost` hears the reason once, when the connection is lost and not just closed.

        Raises:
            WireError: the server refused, or is another replica.
            OSError, TimeoutError: it is not there.
        """
        async with asyncio.timeout(timeout_s):
            _, link = await asyncio.get_running_loop().create_connection(lambda: _ClientLink(on_lost), host, port)
            try:
                found = await link.greet(token)
                if found != replica_id:
                    raise WireError(link.peer, f"expected replica {replica_id!r}, found {found!r}; check its address")
            except BaseException:
                link.leave("the greeting failed")
                raise
        return cls(replica_id, link)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        await self._link.writable()
        call = self._link.begin(self.replica_id, request)
        inbox = self._link.inboxes[call]
        try:
            delta = await inbox.get()
            while delta.finish is None:
                yield delta
                delta = await inbox.get()
            yield delta
        finally:
            self._link.end(call)

    async def abort(self, request_id: str) -> None:
        self._link.send([MessageKind.ABORT, request_id])

    def close(self) -> None:
        self._link.leave("closed on this side")


class _Inbox:
    """What has arrived for one call, for one reader."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._deltas: deque[Delta] = deque()
        self._lost: str | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._wake()

    def lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._wake()

    async def get(self) -> Delta:
        while not self._deltas:
            if self._lost is not None:
                raise ReplicaLostError(self._replica_id, self._lost)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._taken()

    def _taken(self) -> Delta:
        run = [self._deltas.popleft()]
        while self._deltas and self._deltas[0].version == run[0].version:
            run.append(self._deltas.popleft())
        return run[0] if len(run) == 1 else joined(run)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _ClientLink(Connection):
    def __init__(self, on_lost: Callable[[str], None] | None) -> None:
        super().__init__()
        self.admitted = True  # it was us who called
        self.inboxes: dict[int, _Inbox] = {}
        self._on_lost, self._numbers = on_lost, count()
        self._welcome: asyncio.Future[str] = self._loop.create_future()
        self._gone: str | None = None

    async def greet(self, token: str) -> str:
        """The replica's id; raises WireError when it refuses."""
        self.send([MessageKind.HELLO, PROTOCOL, token])
        return await self._welcome

    def begin(self, replica_id: str, request: EngineRequest) -> int:
        """The number of a call that was sent; raises ReplicaLostError when there is no connection."""
        if self._gone is not None:
            raise ReplicaLostError(replica_id, self._gone)
        call = next(self._numbers)
        self.send(request_message(call, request))
        self.inboxes[call] = _Inbox(replica_id)
        return call

    def end(self, call: int) -> None:
        """Leaves a call; one that has not ended is aborted."""
        if self.inboxes.pop(call, None) is not None and self._gone is None:
            self.send([MessageKind.DROP, call])

    def leave(self, reason: str) -> None:
        self._on_lost = None
        self.close(reason)
        self._fail(reason)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        plug = transport.get_extra_info("socket")
        plug.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                plug.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def received(self, message: list[Any]) -> None:
        match message:
            case [MessageKind.DELTA, int(call), *items]:
                self._deliver(call, read_delta(items))
            case [MessageKind.WELCOME, str(replica_id)] if not self._welcome.done():
                self._welcome.set_result(replica_id)
            case [MessageKind.LOST, int(call), str(reason)]:
                if (inbox := self.inboxes.pop(call, None)) is not None:
                    inbox.lose(reason)
            case [MessageKind.REFUSED, str(reason)]:
                self.close(str(WireError(self.peer, reason)))
            case _:
                raise ValueError(f"a message of kind {message[:1]} with {len(message)} items is not understood here")

    def over(self, reason: str) -> None:
        self._fail(reason)
        if self._on_lost is not None:
            self._on_lost(reason)

    def _deliver(self, call: int, delta: Delta) -> None:
        if (inbox := self.inboxes.get(call)) is None:
            return  # it crossed the DROP
        if delta.finish is not None:
            del self.inboxes[call]
        inbox.put(delta)

    def _fail(self, reason: str) -> None:
        self._gone = self._gone or reason
        if not self._welcome.done():
            self._welcome.set_exception(WireError(self.peer, reason))
        for inbox in self.inboxes.values():
            inbox.lose(self._gone)
        self.inboxes.clear()
