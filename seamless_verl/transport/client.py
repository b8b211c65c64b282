"""The data plane's end of the transport: a remote replica, used as an engine over a connection.

Invariants:
- A call has an inbox from before its request is sent until it has ended or its reader has left; later chunks are
  dropped. When the connection is lost every inbox first gives what had arrived, and then raises ReplicaLostError.
- Waiting chunks of one version are read as one, so that a reader that is far behind reads at less cost. It does not
  slow the server down, which would stop all calls of the connection: what waits is bounded by the call's token budget,
  8 bytes a token, plus the top logprobs and the routes.
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

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # detects a host that vanished within 25 s


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
        """Connects with the token; `on_lost` is called once, with the reason, if the connection is lost but not closed.

        Raises WireError if the server refused, or is another replica, OSError or TimeoutError if it is not reachable.
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
                connection.close_quietly("the greeting failed")
                raise
        return cls(replica_id, connection)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        connection = self._connection
        await connection.writable()
        call, inbox = connection.begin(request)
        try:
            ended = False
            while not ended:
                await inbox.filled()
                chunk = _take(inbox.chunks)
                ended = chunk.finish_reason is not None
                yield chunk
        finally:
            connection.end(call)

    def close(self) -> None:
        self._connection.close_quietly("closed on this side")


def _take(chunks: deque[TokenChunk]) -> TokenChunk:
    """The oldest chunk, with those of its version that follow it."""
    run = [chunks.popleft()]
    while chunks and chunks[0].version == run[0].version:
        run.append(chunks.popleft())
    return run[0] if len(run) == 1 else merge_chunks(run)


class _Inbox:
    """The chunks that have arrived for one call, for one reader."""

    def __init__(self, replica_id: str) -> None:
        self.chunks: deque[TokenChunk] = deque()
        self._replica_id = replica_id
        self._lost: str | None = None
        self._reader: asyncio.Future[None] | None = None

    async def filled(self) -> None:
        """Returns when there is a chunk; raises ReplicaLostError when none will come."""
        while not self.chunks:
            if self._lost is not None:
                raise ReplicaLostError(self._replica_id, self._lost)
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self.wake()

    def wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _ClientConnection(Connection):
    def __init__(self, replica_id: str, on_lost: Callable[[str], None] | None) -> None:
        super().__init__()
        self.admitted = True  # the client chose this server
        self.inboxes: dict[int, _Inbox] = {}
        self._replica_id, self._on_lost, self._numbers = replica_id, on_lost, count()
        self._welcome: asyncio.Future[str] = self._loop.create_future()
        self._lost: str | None = None

    async def greet(self, token: str) -> str:
        """Identifies this client; returns the replica's id. Raises WireError if the server refuses."""
        self.send(Hello(PROTOCOL, token))
        return await self._welcome

    def begin(self, request: EngineRequest) -> tuple[int, _Inbox]:
        """Sends a request; returns its call's number and inbox. Raises ReplicaLostError if there is no connection."""
        if self._lost is not None:
            raise ReplicaLostError(self._replica_id, self._lost)
        call = next(self._numbers)
        self.send(generate_message(call, request))
        inbox = self.inboxes[call] = _Inbox(self._replica_id)
        return call, inbox

    def end(self, call: int) -> None:
        """Ends the reading of a call; one that has not ended is aborted."""
        if self.inboxes.pop(call, None) is not None and self._lost is None:
            self.send(Drop(call))

    def close_quietly(self, reason: str) -> None:
        """Closes without a call of `on_lost`, and without waiting for a peer that reads no more."""
        self._on_lost = None
        self.close(reason)
        self._fail(reason)
        if self.unsent and self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def received(self, message: Message) -> None:
        match message:
            case Chunk(call=call):
                if (inbox := self.inboxes.get(call)) is not None:  # else it was sent before the Drop arrived
                    chunk = token_chunk(message, self._replica_id)  # a malformed one loses all inboxes, this one too
                    if chunk.finish_reason is not None:
                        del self.inboxes[call]
                    inbox.chunks.append(chunk)
                    inbox.wake()
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

    def _fail(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._writable.set()  # a call that waits to be sent gets the loss: a peer that reads nothing never says so
        if not self._welcome.done():
            self._welcome.set_exception(WireError(self.peer, reason))
        for inbox in self.inboxes.values():
            inbox.lose(self._lost)
        self.inboxes.clear()
