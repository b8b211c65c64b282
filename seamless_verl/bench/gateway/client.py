"""A client light enough not to be what is measured: HTTP/1.1 on a kept connection, the request written beforehand.

It times a reply and looks for its end; it parses nothing else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import perf_counter
from typing import cast

END_OF_CHUNKS = b"0\r\n\r\n"


@dataclass(frozen=True)
class Timed:
    """Seconds from the request's writing to the first byte of the body, and to its last."""

    first: float
    whole: float


class BadReplyError(RuntimeError):
    """A server did not answer 200, or its connection broke."""


def request(path: str, body: bytes, key: str = "none") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nAccept: */*\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection(asyncio.Protocol):
    """One connection, one request at a time; `body` is the last reply's, as it came."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._head, self.body = bytearray(), bytearray()
        self._length: int | None = None  # of the body; None where it comes in chunks
        self._in_body = False
        self._began = self._first = 0.0
        self._done: asyncio.Future[Timed] | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        _, made = await asyncio.get_running_loop().create_connection(cls, host, port)
        return made

    async def ask(self, raw: bytes) -> Timed:
        """Raises BadReplyError."""
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
            self._end()

    def _read_head(self, head: bytes) -> None:
        self._in_body, self._length = True, None
        self._good = head.startswith(b"http/1.1 200")
        for line in head.split(b"\r\n"):
            if line.startswith(b"content-length:"):
                self._length = int(line[15:])

    def _end(self) -> None:
        assert self._done is not None
        if self._good:
            self._done.set_result(Timed(self._first - self._began, perf_counter() - self._began))
        else:
            self._fail(f"refused: {bytes(self.body[:500])!r}")

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(BadReplyError(why))
