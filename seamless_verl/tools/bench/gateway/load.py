"""The load of the gateway bench, the same for every arm: pacing of the stub engine, requests, and an HTTP client.

The client is light enough not to be what is measured. It speaks HTTP/1.1 on a kept connection, sends requests that
were encoded beforehand, times a reply and looks for its end; it parses nothing else.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from random import Random
from time import perf_counter
from typing import Any, cast

VOCABULARY = 128  # bytes that are a character each, and none that ends a turn
MODEL = "nano"
QUESTION = "You are an agent with a shell. List the files that changed since the last release, newest first."
LENGTHS = 64  # drawn, then requested in turn


@dataclass(frozen=True)
class Pacing:
    """`tokens` in each reply, `tokens_per_chunk` at a time, `delay_s` seconds apart; 0 is at once."""

    name: str
    tokens: int
    tokens_per_chunk: int
    delay_s: float

    def engine_s(self, tokens: int) -> float:
        """Seconds that the engine itself takes for `tokens`."""
        return ceil(tokens / self.tokens_per_chunk) * self.delay_s


AT_ONCE = Pacing("at-once", 16, 16, 0.0)
"""A whole reply in one chunk: nothing but the cost of a request is left."""
STEADY = Pacing("steady", 32, 1, 0.02)
"""A token every 20 ms, as a model of some billion parameters gives them to each of 32 calls."""
PACINGS = {pacing.name: pacing for pacing in (AT_ONCE, STEADY)}


class Callers(StrEnum):
    """How the requests of concurrent clients coincide."""

    IN_STEP = "in step"
    """they begin together, and replies are equally long, so that all requests keep coming at one instant: the last of
    them waits for the cost of a request, times their number"""
    APART = "apart"
    """they begin spread over the time of a reply, and replies are half to one and a half times as long, as agents'
    are. If they were only spread, they would keep their distance and never coincide; with lengths alone the first
    requests would come at one instant. With both, requests coincide at random"""


@dataclass(frozen=True)
class Shape:
    """What clients do: `concurrent` calls at once, streamed or not."""

    concurrent: int
    stream: bool
    callers: Callers = Callers.IN_STEP

    @property
    def name(self) -> str:
        number = f"{self.concurrent} {self.callers}," if self.concurrent > 1 else "1"
        return f"{number} {'streamed' if self.stream else 'whole'}"

    def start_delay_s(self, caller: int, pacing: Pacing) -> float:
        """Seconds that a caller waits before its first request."""
        spread = self.callers is Callers.APART
        return caller / self.concurrent * pacing.engine_s(pacing.tokens) if spread else 0.0

    def requests(self, pacing: Pacing) -> list[BenchRequest]:
        """The requests that are sent in turn."""
        if self.callers is Callers.IN_STEP:
            return [BenchRequest.of(pacing, pacing.tokens, stream=self.stream)]
        draw = Random(0)
        lengths = [draw.randint(pacing.tokens // 2, pacing.tokens + pacing.tokens // 2) for _ in range(LENGTHS)]
        return [BenchRequest.of(pacing, length, stream=self.stream) for length in lengths]


def shapes(pacing: Pacing) -> list[Shape]:
    """The shapes that differ at this pacing: replies that take no time cannot be spread over it."""
    several = [(32, callers) for callers in (Callers if pacing.delay_s else [Callers.IN_STEP])]
    return [Shape(n, stream, callers) for n, callers in ((1, Callers.IN_STEP), *several) for stream in (False, True)]


@dataclass(frozen=True)
class BenchRequest:
    """The body of a call, which every arm gets byte for byte, and the seconds that the engine itself takes for it."""

    body: bytes
    engine_s: float

    @classmethod
    def of(cls, pacing: Pacing, tokens: int, *, stream: bool) -> BenchRequest:
        body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": tokens}
        return cls(json.dumps(body | {"stream": stream}).encode(), pacing.engine_s(tokens))


END_OF_CHUNKS = b"0\r\n\r\n"


@dataclass(frozen=True)
class ReplyTiming:
    """Seconds from writing the request to the first byte of the reply's body, and to its last byte."""

    first: float
    whole: float


class BadReplyError(RuntimeError):
    """A server did not answer 200, or its connection broke."""


def http_request(path: str, body: bytes, key: str = "none") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nAccept: */*\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class BenchConnection(asyncio.Protocol):
    """One connection, one request at a time; `body` is that of the last reply, as it came."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head, self.body = bytearray(), bytearray()
        self._length: int | None = None  # of the body; None where it comes in chunks
        self._in_body = False
        self._began = self._first = 0.0
        self._done: asyncio.Future[ReplyTiming] | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> BenchConnection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        return connection

    async def send(self, raw: bytes) -> ReplyTiming:
        """Sends a request; returns the timing of its whole reply. Raises BadReplyError."""
        assert self._transport is not None and self._done is None, "one request at a time"
        self._head.clear()
        self.body.clear()
        self._in_body, self._first = False, 0.0
        self._done = asyncio.get_running_loop().create_future()
        self._began = perf_counter()
        self._transport.write(raw)
        try:
            return await self._done
        finally:
            self._done = None

    async def ask(self, path: str, body: Any, key: str = "none") -> Any:
        """Sends a request in JSON; returns its reply."""
        await self.send(http_request(path, json.dumps(body).encode(), key))
        return json.loads(self.body)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was lost: {exc or 'closed by the server'}")

    def data_received(self, data: bytes) -> None:
        if not self._in_body:
            self._head += data
            at = self._head.find(b"\r\n\r\n")
            if at < 0:
                return
            data = bytes(self._head[at + 4 :])
            self._read_head(bytes(self._head[:at]).lower())
        if data and not self._first:
            self._first = perf_counter()
        self.body += data
        whole = self.body.endswith(END_OF_CHUNKS) if self._length is None else len(self.body) >= self._length
        if whole and self._done is not None and not self._done.done():
            self._finish()

    def _read_head(self, head: bytes) -> None:
        self._in_body, self._length = True, None
        self._good = head.startswith(b"http/1.1 200")
        for line in head.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                self._length = int(line[15:])

    def _finish(self) -> None:
        assert self._done is not None
        if self._good:
            self._done.set_result(ReplyTiming(self._first - self._began, perf_counter() - self._began))
        else:
            self._fail(f"refused: {bytes(self.body[:500])!r}")

    def _fail(self, reason: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(BadReplyError(reason))
