"""The replica's end: runs the calls of its clients on the engine at hand.

Invariants:
- Nobody is served who has not shown the token.
- Each call has one task; it ends with its call, with a DROP, or with its connection, and leaves nothing
  running in the engine.
- What one client sends, or a defect of the engine in one call, harms no other client.
"""

from __future__ import annotations

import asyncio
import hmac
from contextlib import aclosing, suppress
from typing import Any

from seamless_verl.errors import ReplicaLostError
from seamless_verl.rollout.engine import Delta, EngineFinish, EngineRequest, EngineSource
from seamless_verl.trajectory.records import logprobs, tokens
from seamless_verl.transport.codec import PROTOCOL, MessageKind, delta_message, read_request
from seamless_verl.transport.connection import Connection

GREETING_S = 10.0  # seconds a client has to say who it is


async def serve_engine(
    source: EngineSource, host: str, port: int, *, token: str, replica_id: str, greeting_s: float = GREETING_S
) -> EngineServer:
    """Serves the engine to whoever has the token; port 0 takes a free one. Raises OSError when it cannot listen."""
    server = EngineServer(source, token=token, replica_id=replica_id, greeting_s=greeting_s)
    await server.listen(host, port)
    return server


class EngineServer:
    """A listening server and its connections."""

    def __init__(self, source: EngineSource, *, token: str, replica_id: str, greeting_s: float) -> None:
        self.source, self.token, self.replica_id, self.greeting_s = source, token, replica_id, greeting_s
        self.links: set[_ServerLink] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None, "it does not listen"
        return int(self._server.sockets[0].getsockname()[1])

    async def listen(self, host: str, port: int) -> None:
        self._server = await asyncio.get_running_loop().create_server(lambda: _ServerLink(self), host, port)

    async def close(self) -> None:
        """Closes every connection, and returns when every call has been aborted in the engine."""
        if self._server is not None:
            self._server.close()
        for link in tuple(self.links):
            link.abandon("the server was closed")
        if self.tasks:
            await asyncio.wait(self.tasks)


class _ServerLink(Connection):
    def __init__(self, server: EngineServer) -> None:
        super().__init__()
        self._server = server
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._greeting = self._loop.call_later(server.greeting_s, self.refuse, "nobody said hello in time")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.links.add(self)

    def received(self, message: list[Any]) -> None:
        match message:
            case [MessageKind.HELLO, int(protocol), str(token)] if not self.admitted:
                self._hello(protocol, token)
            case _ if not self.admitted:
                self.refuse("say hello first")
            case [MessageKind.GENERATE, int(call), *request] if call not in self._calls:
                self._begin(call, read_request(request))
            case [MessageKind.DROP, int(call)]:
                if (task := self._calls.pop(call, None)) is not None:
                    task.cancel()
            case [MessageKind.ABORT, str(request_id)]:
                self._keep(self._loop.create_task(self._abort(request_id)))
            case _:
                raise ValueError(f"a message of kind {message[:1]} with {len(message)} items is not understood here")

    def over(self, reason: str) -> None:
        self._greeting.cancel()
        self._server.links.discard(self)
        for task in self._calls.values():
            task.cancel()
        self._calls.clear()

    def abandon(self, reason: str) -> None:
        """Closes, and lets no call wait for a client that no longer reads."""
        self.close(reason)
        self.over(reason)

    def _hello(self, protocol: int, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self._server.token.encode()):
            self.refuse("the token is not the one of this replica")
        elif protocol != PROTOCOL:
            self.refuse(f"protocol {protocol}, but this replica speaks {PROTOCOL}; run the same version on both ends")
        else:
            self._greeting.cancel()
            self.admitted = True
            self.send([MessageKind.WELCOME, self._server.replica_id])

    def _begin(self, call: int, request: EngineRequest) -> None:
        task = self._calls[call] = self._loop.create_task(self._run(call, request))
        self._keep(task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    async def _run(self, call: int, request: EngineRequest) -> None:
        """Supervises one call: what goes wrong in it becomes its last message."""
        ended = False
        try:
            async with aclosing(self._server.source.generate(request)) as deltas:
                async for delta in deltas:
                    await self.writable()
                    ended = delta.finish is not None
                    self._tell(call, delta_message(call, delta), ended)
        except ReplicaLostError as loss:
            ended = True
            self._tell(call, [MessageKind.LOST, call, loss.reason], ended)
        except Exception as error:  # of an engine: told to the caller, where it is met
            reason = f"{type(error).__name__}: {error}"
            failed = Delta(tokens(()), logprobs(()), 0, EngineFinish.ERROR, reason)
            self._tell(call, delta_message(call, failed), True)
        finally:
            if not ended:
                await self._abort(request.request_id)

    async def _abort(self, request_id: str) -> None:
        with suppress(ReplicaLostError):  # then nothing runs
            await self._server.source.abort(request_id)

    def _tell(self, call: int, message: list[Any], ended: bool) -> None:
        if call in self._calls:
            self.send(message)
            if ended:
                del self._calls[call]
