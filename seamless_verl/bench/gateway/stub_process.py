"""The engine of every arm, a process: a stub with two faces, our wire and an OpenAI API.

Run as `python -m seamless_verl.bench.gateway.stub_process`; it prints its two ports and serves until its
standard input closes. A POST to /pace with three numbers (tokens in a delta, seconds between two) changes its pace.
"""

from __future__ import annotations

import asyncio
import json
from itertools import count
from typing import Any, cast

from seamless_verl.bench.gateway.arms import child, run, say
from seamless_verl.bench.gateway.load import MODEL, VOCABULARY
from seamless_verl.rollout.engine import Delta, EngineRequest
from seamless_verl.testing.stub_engine import StubEngine
from seamless_verl.trajectory.records import tokens
from seamless_verl.transport import serve_engine

TOKEN, REPLICA = "of the bench", "stub"
PROMPT = tokens(range(64))
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


async def serve() -> None:
    engine = StubEngine(REPLICA, vocabulary=VOCABULARY)
    wire = await serve_engine(engine, "127.0.0.1", 0, token=TOKEN, replica_id=REPLICA)
    face = await asyncio.get_running_loop().create_server(lambda: _StubHandler(engine), "127.0.0.1", 0)
    say(wire.port, face.sockets[0].getsockname()[1])
    await child()


class _StubHandler(asyncio.Protocol):
    """One connection of an OpenAI client: each body is asked of the engine, and nothing is checked."""

    numbers = count()

    def __init__(self, engine: StubEngine) -> None:
        self._engine, self._data = engine, bytearray()
        self._transport: asyncio.Transport | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = bytes(self._data).partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if not found or len(body) < length:
            return
        self._data.clear()
        asked = json.loads(body or b"{}")
        if b"/pace" in lines[0]:
            self._engine.tokens_per_delta, self._engine.delay_s = asked
            self._write(_whole([], None))
            return
        task = asyncio.get_running_loop().create_task(self._answer(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: dict[str, Any]) -> None:
        name = f"direct-{next(self.numbers)}"
        request = EngineRequest(name, PROMPT, {"max_tokens": asked.get("max_tokens", 16)})
        deltas: list[Delta] = []
        if asked.get("stream"):
            self._write(STREAM)
        async for delta in self._engine.generate(request):
            deltas.append(delta)
            if asked.get("stream"):
                self._write(_chunk({"content": _text([delta])}, delta.finish))
        self._write(_event(b"[DONE]") + b"0\r\n\r\n" if asked.get("stream") else _whole(deltas, deltas[-1].finish))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _text(deltas: list[Delta]) -> str:
    return bytes(token for delta in deltas for token in delta.ids).decode("ascii")


def _whole(deltas: list[Delta], finish: str | None) -> bytes:
    message = {"role": "assistant", "content": _text(deltas)}
    made = sum(len(delta.ids) for delta in deltas)
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": made, "total_tokens": len(PROMPT) + made}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice], "usage": usage}
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)


def _chunk(delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [choice]}
    return _event(json.dumps(body).encode())


def _event(data: bytes) -> bytes:
    return b"%x\r\ndata: %s\n\n\r\n" % (len(data) + 8, data)


if __name__ == "__main__":
    run(serve())
