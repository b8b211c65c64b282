"""The data plane's end of the transport: a replica behind a connection, as an engine.

Invariants:
- A call has an inbox from before its request is sent until it has ended or was left; later chunks are dropped.
- When the connection is lost every inbox first gives what had arrived, and then raises ReplicaLostError.
- What waits for a slow reader comes as one chunk where it is of one version, so that reading it costs less the
  further the reader is behind.

Nothing slows the server down for one client that reads slowly, since that would stop all calls of the connection;
what waits in an inbox is bounded by its call's token budget, 8 bytes a token and what it asked for on top.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import count

from seamless_verl.errors import ReplicaLostError, WireError
from seamless_verl.rollout.engine import EngineRequest
from seamless_verl.trajectory.records import TokenChunk, merge_chunks
from seamless_verl.transport.codec import (
    PROTOCOL,
    Abort,
    Chunk,
    Drop,
    Hello,
    Lost,
    Message,
    Refused,
    Welcome,
    generate_message,
    token_chunk,
)
from seamless_verl.transport.connection import Connection

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # a host that vanished is noticed in 25 s


class RemoteEngine:
    """A replica's engine over a connection; `connect` makes one."""

    def __init__(self, replica_id: str, connection: _ClientConnection) -> None:
        self.replica_id = replica_id
        self._connection = connection

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
        """Connects and shows the token; `on_lost` gets the reason once, when the connection is lost, not when closed.

        Raises:
            WireError: the server refused, or is another replica.
            OSError, TimeoutError: it is not reachable.
        """
        async with asyncio.timeout(timeout_s):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(lambda: _ClientConnection(replica_id, on_lost), host, port)
            try:
                found = await connection.greet(token)
                if found != replica_id:
                    reason = f"expected replica {replica_id!r}, found {found!r}; check its address"
                    raise WireError(connection.peer, reason)
            except BaseException:
                connection.leave("the greeting failed")
                raise
        return cls(replica_id, connection)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        await self._connection.writable()
        call = self._connection.begin(request)
        inbox = self._connection.inboxes[call]
        try:
            chunk = await inbox.get()
            while chunk.finish_reason is None:
                yield chunk
                chunk = await inbox.get()
            yield chunk
        finally:
            self._connection.end(call)

    async def abort(self, request_id: str) -> None:
        self._connection.send(Abort(request_id))

    def close(self) -> None:
        self._connection.leave("closed on this side")


class _Inbox:
    """What has arrived for one call, for one reader."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id
        self._chunks: deque[TokenChunk] = deque()
        self._lost: str | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, chunk: TokenChunk) -> None:
        self._chunks.append(chunk)
        self._wake()

    def lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._wake()

    async def get(self) -> TokenChunk:
        while not self._chunks:
            if self._lost is not None:
                raise ReplicaLostError(self._replica_id, self._lost)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return self._next()

    def _next(self) -> TokenChunk:
        """The oldest chunk, with those of its version that follow it."""
        run = [self._chunks.popleft()]
        while self._chunks and self._chunks[0].version == run[0].version:
            run.append(self._chunks.popleft())
        return run[0] if len(run) == 1 else merge_chunks(run)

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _ClientConnection(Connection):
    def __init__(self, replica_id: str, on_lost: Callable[[str], None] | None) -> None:
        super().__init__()
        self.admitted = True  # the client chose whom to call
        self.inboxes: dict[int, _Inbox] = {}
        self._replica_id, self._on_lost, self._numbers = replica_id, on_lost, count()
        self._welcome: asyncio.Future[str] = self._loop.create_future()
        self._lost: str | None = None

    async def greet(self, token: str) -> str:
        """The id of the replica that answers; raises WireError when it refuses."""
        self.send(Hello(PROTOCOL, token))
        return await self._welcome

    def begin(self, request: EngineRequest) -> int:
        """The number of a call that was sent; raises ReplicaLostError when there is no connection."""
        if self._lost is not None:
            raise ReplicaLostError(self._replica_id, self._lost)
        call = next(self._numbers)
        self.send(generate_message(call, request))
        self.inboxes[call] = _Inbox(self._replica_id)
        return call

    def end(self, call: int) -> None:
        """Leaves a call; one that has not ended is aborted."""
        if self.inboxes.pop(call, None) is not None and self._lost is None:
            self.send(Drop(call))

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

    def received(self, message: Message) -> None:
        match message:
            case Chunk():
                self._deliver(message)
            case Welcome(replica_id=replica_id) if not self._welcome.done():
                self._welcome.set_result(replica_id)
            case Lost(call=call, reason=reason):
                if (inbox := self.inboxes.pop(call, None)) is not None:
                    inbox.lose(reason)
            case Refused(reason=reason):
                self.close(str(WireError(self.peer, reason)))
            case _:
                raise ValueError(f"a {type(message).__name__} is not expected here")

    def disconnected(self, reason: str) -> None:
        self._fail(reason)
        if self._on_lost is not None:
            self._on_lost(reason)

    def _deliver(self, message: Chunk) -> None:
        if (inbox := self.inboxes.get(message.call)) is None:
            return  # it crossed the Drop
        if message.finish_reason is not None:
            del self.inboxes[message.call]
        inbox.put(token_chunk(message, self._replica_id))

    def _fail(self, reason: str) -> None:
        self._lost = self._lost or reason
        if not self._welcome.done():
            self._welcome.set_exception(WireError(self.peer, reason))
        for inbox in self.inboxes.values():
            inbox.lose(self._lost)
        self.inboxes.clear()
