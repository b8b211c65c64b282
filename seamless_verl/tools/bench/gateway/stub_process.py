"""Stub engines in a process of their own: each serves our transport, and the first one an OpenAI API, too.

Run as `python -m seamless_verl.tools.bench.gateway.stub_process REPLICAS TOKENS_PER_CHUNK SECONDS_PER_CHUNK`. It prints
their ports, the OpenAI API's last, and serves until its standard input closes. A POST to /pacing with two numbers
(tokens in a chunk, seconds between two chunks) changes the first one's pacing.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import count
from typing import Any, cast

import uvloop

from seamless_verl.rollout.engine import EngineRequest
from seamless_verl.tools.bench.gateway.arms import announce_ports, wait_for_parent
from seamless_verl.tools.bench.gateway.load import MODEL, VOCABULARY
from seamless_verl.tools.bench.stub_engine import StubEngine
from seamless_verl.trajectory.records import TokenChunk, tokens
from seamless_verl.transport import serve_engine

TOKEN = "of the bench"
PROMPT = tokens(range(64))
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def replica_name(number: int) -> str:
    return f"stub-{number}"


async def serve(replicas: int, tokens_per_chunk: int, delay_s: float) -> None:
    pacing: dict[str, Any] = {"tokens_per_chunk": tokens_per_chunk, "delay_s": delay_s, "vocabulary": VOCABULARY}
    engines = [StubEngine(replica_name(number), **pacing) for number in range(replicas)]
    servers = [await serve_engine(one, "127.0.0.1", 0, token=TOKEN, replica_id=one.replica_id) for one in engines]
    openai = await asyncio.get_running_loop().create_server(lambda: _StubHandler(engines[0]), "127.0.0.1", 0)
    announce_ports(*(server.port for server in servers), openai.sockets[0].getsockname()[1])
    await wait_for_parent()


class _StubHandler(asyncio.Protocol):
    """One connection of an OpenAI client: each body becomes an engine request, and nothing is checked."""

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
        parsed = json.loads(body or b"{}")
        if b"/pacing" in lines[0]:
            self._engine.tokens_per_chunk, self._engine.delay_s = parsed
            self._write(_whole_reply([], None))
            return
        task = asyncio.get_running_loop().create_task(self._reply(parsed))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, body: dict[str, Any]) -> None:
        name = f"direct-{next(self.numbers)}"
        request = EngineRequest(name, PROMPT, {"max_tokens": body.get("max_tokens", 16)})
        chunks: list[TokenChunk] = []
        streamed = bool(body.get("stream"))
        if streamed:
            self._write(STREAM)
        async for chunk in self._engine.generate(request):
            chunks.append(chunk)
            if streamed:
                self._write(_stream_event({"content": _text([chunk])}, chunk.finish_reason))
        if streamed:
            self._write(_http_chunk(b"[DONE]") + b"0\r\n\r\n")
        else:
            self._write(_whole_reply(chunks, chunks[-1].finish_reason))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)


def _text(chunks: list[TokenChunk]) -> str:
    return bytes(token for chunk in chunks for token in chunk.ids).decode("ascii")


def _whole_reply(chunks: list[TokenChunk], finish: str | None) -> bytes:
    message = {"role": "assistant", "content": _text(chunks)}
    generated = sum(len(chunk.ids) for chunk in chunks)
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": generated, "total_tokens": len(PROMPT) + generated}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion", "created": 0, "model": MODEL, "choices": [choice], "usage": usage}
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)


def _stream_event(delta: dict[str, str], finish: str | None) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", **delta}, "finish_reason": finish}
    body = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": MODEL, "choices": [choice]}
    return _http_chunk(json.dumps(body).encode())


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\ndata: %s\n\n\r\n" % (len(data) + 8, data)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
