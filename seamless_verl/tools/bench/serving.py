"""The processes that the benches of the gateway measure with: `python -m seamless_verl.tools.bench.serving KIND ...`.

`stub REPLICAS TOKENS_PER_CHUNK SECONDS_PER_CHUNK` has stub engines. Each serves our transport, and the first one an
OpenAI API, too, whose port is printed last; a POST to /pacing with two numbers (tokens in a chunk, seconds between two)
changes that one's pacing. `gateway MODEL JOURNAL ENGINE_PORT ...` is our gateway as it runs in training: connected to
its replicas, with its journal on disk. Both print their ports, and serve until their standard input closes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.server import Gateway, GatewaySettings
from seamless_verl.journal import SqliteJournal
from seamless_verl.rollout.call import Calls
from seamless_verl.rollout.engine import EngineRequest
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.tools.bench.load import ADMIN_KEY, MODEL, content_length
from seamless_verl.tools.bench.shared import serve_until_parent_ends
from seamless_verl.tools.bench.stub_engine import StubEngine
from seamless_verl.trajectory.records import TokenChunk, tokens
from seamless_verl.transport import RemoteEngine, serve_engine

TOKEN = "of the bench"
VOCABULARY = 128  # bytes that are a character each, and none that ends a turn
SEATS = 256
PROMPT = tokens(range(64))
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"


async def serve_stubs(replicas: int, tokens_per_chunk: int, delay_s: float) -> None:
    pacing: dict[str, Any] = {"tokens_per_chunk": tokens_per_chunk, "delay_s": delay_s, "vocabulary": VOCABULARY}
    engines = [StubEngine(f"stub-{number}", **pacing) for number in range(replicas)]
    servers = [await serve_engine(one, "127.0.0.1", 0, token=TOKEN, replica_id=one.replica_id) for one in engines]
    openai = await asyncio.start_server(partial(answer_openai, engines[0]), "127.0.0.1", 0)
    await serve_until_parent_ends(*(server.port for server in servers), openai.sockets[0].getsockname()[1])


async def answer_openai(engine: StubEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of an OpenAI client: each body becomes an engine request, and nothing is checked."""
    numbers = count()
    with suppress(asyncio.IncompleteReadError, ConnectionError):  # the client has gone
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            body = json.loads(await reader.readexactly(content_length(head) or 0) or b"{}")
            if b"/pacing" in head.partition(b"\r\n")[0]:
                engine.tokens_per_chunk, engine.delay_s = body
                writer.write(whole_reply([], None))
                continue
            name = f"direct-{id(writer)}-{next(numbers)}"
            chunks, streamed = list[TokenChunk](), bool(body.get("stream"))
            writer.write(STREAM if streamed else b"")
            async for chunk in engine.generate(EngineRequest(name, PROMPT, {"max_tokens": body.get("max_tokens", 16)})):
                chunks.append(chunk)
                if streamed:
                    delta = {"role": "assistant", "content": text_of([chunk])}
                    event = completion("chat.completion.chunk", {"delta": delta}, chunk.finish_reason)
                    writer.write(http_chunk(json.dumps(event).encode()))
            last = http_chunk(b"[DONE]") + b"0\r\n\r\n"
            writer.write(last if streamed else whole_reply(chunks, chunks[-1].finish_reason))


def text_of(chunks: Sequence[TokenChunk]) -> str:
    return bytes(token for chunk in chunks for token in chunk.ids).decode("ascii")


def completion(kind: str, choice: dict[str, Any], finish: str | None) -> dict[str, Any]:
    choices = [{"index": 0, **choice, "finish_reason": finish}]
    return {"id": "c", "object": kind, "created": 0, "model": MODEL, "choices": choices}


def whole_reply(chunks: Sequence[TokenChunk], finish: str | None) -> bytes:
    made = sum(len(chunk.ids) for chunk in chunks)
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": made, "total_tokens": len(PROMPT) + made}
    message = {"role": "assistant", "content": text_of(chunks)}
    data = json.dumps(completion("chat.completion", {"message": message}, finish) | {"usage": usage}).encode()
    return WHOLE % (len(data), data)


def http_chunk(data: bytes) -> bytes:
    return b"%x\r\ndata: %s\n\n\r\n" % (len(data) + 8, data)


async def serve_gateway(model: str, journal_path: str, *engine_ports: str) -> None:
    fleet = Fleet()
    fleet.commit(0)
    for number, port in enumerate(engine_ports):
        engine = await RemoteEngine.connect("127.0.0.1", int(port), token=TOKEN, replica_id=f"stub-{number}")
        control = StubEngine(f"stub-{number}")  # which nobody asks to pause
        fleet.add(f"stub-{number}", engine=engine, control=control, capacity=SEATS, version=0)
    with SqliteJournal(Path(journal_path)) as journal:

        def take(session_id: str) -> None:  # as soon as it has ended, as a trainer does
            recorder.take(session_id)

        recorder = JournalRecorder(journal, on_closed=take)
        settings = GatewaySettings(model, ADMIN_KEY, ("--served-model-name", MODEL))
        async with Gateway(settings, source=Calls(fleet), recorder=recorder) as gateway:
            await serve_until_parent_ends(int(gateway.url.rpartition(":")[2]))
        for name in list(fleet):
            await fleet.remove(name)


if __name__ == "__main__":
    logging.disable(logging.INFO)
    kind, *given = sys.argv[1:]
    if kind == "stub":
        uvloop.run(serve_stubs(int(given[0]), int(given[1]), float(given[2])))
    else:
        uvloop.run(serve_gateway(*given))
