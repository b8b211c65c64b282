"""The replica's end of the transport: runs the calls of its clients on the local engine.

Invariants:
- A client is served only after it has sent the token.
- Each call has one task, which ends with its call, a Drop, or its connection; then nothing of it runs in the engine.
- A malformed message of one client, or a defect of the engine in one call, affects no other client.
"""

from __future__ import annotations

import asyncio
import hmac
from contextlib import aclosing, suppress

from seamless_verl.errors import ReplicaLostError
from seamless_verl.rollout.engine import EngineRequest, EngineSource
from seamless_verl.trajectory.records import Finish, empty_chunk
from seamless_verl.transport.codec import (
    PROTOCOL,
    Chunk,
    Drop,
    Generate,
    Hello,
    Lost,
    Message,
    Welcome,
    chunk_message,
    engine_request,
)
from seamless_verl.transport.connection import Connection

GREETING_S = 10.0  # seconds a client has to identify itself


async def serve_engine(
    source: EngineSource, host: str, port: int, *, token: str, replica_id: str, greeting_s: float = GREETING_S
) -> EngineServer:
    """Serves the engine to clients with the token; port 0 takes a free one. Raises OSError if it cannot listen."""
    server = EngineServer(source, token=token, replica_id=replica_id, greeting_s=greeting_s)
    loop = asyncio.get_running_loop()
    server.listener = await loop.create_server(lambda: _ServerConnection(server), host, port)
    return server


class EngineServer:
    """A listening server and its connections; `serve_engine` makes one."""

    listener: asyncio.Server

    def __init__(self, source: EngineSource, *, token: str, replica_id: str, greeting_s: float) -> None:
        self.source, self.token, self.replica_id, self.greeting_s = source, token, replica_id, greeting_s
        self.connections: set[_ServerConnection] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        return int(self.listener.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Closes every connection, and returns when every call has been aborted in the engine."""
        self.listener.close()
        for connection in tuple(self.connections):
            connection.abandon("the server was closed")
        if self.tasks:
            await asyncio.wait(self.tasks)


class _ServerConnection(Connection):
    def __init__(self, server: EngineServer) -> None:
        super().__init__()
        self._server = server
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._greeting = self._loop.call_later(server.greeting_s, self.refuse, "no Hello came in time")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connections.add(self)

    def received(self, message: Message) -> None:
        match message:
            case Hello() if not self.admitted:
                self._admit(message)
            case _ if not self.admitted:
                self.refuse("send Hello first")
            case Generate(call=call) if call not in self._calls:
                task = self._calls[call] = self._loop.create_task(self._run(call, engine_request(message)))
                self._track(task)
            case Drop(call=call):
                if (dropped := self._calls.pop(call, None)) is not None:
                    dropped.cancel()
            case _:
                raise ValueError(f"a {type(message).__name__} is not expected here")

    def disconnected(self, reason: str) -> None:
        self._greeting.cancel()
        self._server.connections.discard(self)
        for task in self._calls.values():
            task.cancel()
        self._calls.clear()

    def abandon(self, reason: str) -> None:
        """Closes, and cancels the calls, so that none waits for a client that reads no more."""
        self.close(reason)
        self.disconnected(reason)

    def _admit(self, hello: Hello) -> None:
        if not hmac.compare_digest(hello.token.encode(), self._server.token.encode()):
            self.refuse("the token is not the one of this replica")
        elif hello.protocol != PROTOCOL:
            reason = f"protocol {hello.protocol}, but this replica uses {PROTOCOL}; run the same version on both ends"
            self.refuse(reason)
        else:
            self._greeting.cancel()
            self.admitted = True
            self.send(Welcome(self._server.replica_id))

    def _track(self, task: asyncio.Task[None]) -> None:
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _run(self, call: int, request: EngineRequest) -> None:
        """Runs one call; an error in it becomes its last message."""
        ended = False
        try:
            async with aclosing(self._server.source.generate(request)) as chunks:
                async for chunk in chunks:
                    await self.writable()
                    ended = chunk.finish_reason is not None
                    if call in self._calls:
                        self.send(chunk_message(call, chunk))
        except ReplicaLostError as loss:
            ended = True
            self._send_last(call, Lost(call, loss.reason))
        except Exception as error:  # of the engine: sent to the client, where the call fails with it
            failed = empty_chunk(Finish.FAILED, stop_reason=f"{type(error).__name__}: {error}")
            self._send_last(call, chunk_message(call, failed))
        finally:
            if not ended:
                await self._abort(request.request_id)
            self._calls.pop(call, None)

    def _send_last(self, call: int, message: Chunk | Lost) -> None:
        if call in self._calls:
            self.send(message)

    async def _abort(self, request_id: str) -> None:
        with suppress(ReplicaLostError):  # then nothing runs any more
            await self._server.source.abort(request_id)
