"""The load of the benches of the gateway, the same for whatever is measured: pacing, requests, and an HTTP client.

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
from typing import Any

MODEL = "nano"
QUESTION = "You are an agent with a shell. List the files that changed since the last release, newest first."
CHAT, SESSIONS = "/v1/chat/completions", "/admin/sessions"
ADMIN_KEY = "the bench's"
END_OF_HEAD, END_OF_CHUNKS = b"\r\n\r\n", b"0\r\n\r\n"
READ_BYTES = 1 << 16
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
class BenchRequest:
    """The body of a call, which every arm gets byte for byte, and the seconds that the engine itself takes for it."""

    body: bytes
    engine_s: float

    @classmethod
    def of(cls, pacing: Pacing, tokens: int, *, stream: bool) -> BenchRequest:
        body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": tokens}
        return cls(json.dumps(body | {"stream": stream}).encode(), pacing.engine_s(tokens))


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


def content_length(head: bytes) -> int | None:
    """What a head in small letters says of its body; None where that comes in chunks, or there is none."""
    return next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), None)


class BenchConnection:
    """One connection, one request at a time; `body` is that of the last reply, as it came."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self.body = reader, writer, b""

    @classmethod
    async def open(cls, host: str, port: int) -> BenchConnection:
        return cls(*await asyncio.open_connection(host, port))

    async def send(self, raw: bytes) -> ReplyTiming:
        """Sends a request; returns the timing of its whole reply. Raises BadReplyError."""
        began, first = perf_counter(), 0.0
        self._writer.write(raw)
        try:
            head = (await self._reader.readuntil(END_OF_HEAD)).lower()
            length, self.body = content_length(head), b""
            while not (self.body.endswith(END_OF_CHUNKS) if length is None else len(self.body) >= length):
                data = await self._reader.read(READ_BYTES if length is None else length - len(self.body))
                if not data:
                    raise ConnectionResetError("closed by the server")
                first = first or perf_counter()
                self.body += data
        except (OSError, asyncio.IncompleteReadError) as error:
            raise BadReplyError(f"the connection was lost: {error}") from error
        if not head.startswith(b"http/1.1 200"):
            raise BadReplyError(f"refused: {self.body[:500]!r}")
        ended = perf_counter()
        return ReplyTiming((first or ended) - began, ended - began)

    async def ask(self, path: str, body: Any, key: str = "none") -> Any:
        """Sends a request in JSON; returns its reply."""
        await self.send(http_request(path, json.dumps(body).encode(), key))
        return json.loads(self.body)

    def close(self) -> None:
        self._writer.close()
