"""One end of a TCP connection that sends and receives frames of messages.

A frame is its length, 4 bytes big-endian, and a msgpack list of messages: all those of one turn of the event loop, in
one write, so that an engine's step costs one system call however many calls it serves.

Invariants:
- Messages arrive in the order in which they were sent, each once, or the connection is lost.
- A malformed message closes its own connection with the reason; what came before it is received.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import cast

from msgspec import Raw

from seamless_verl.errors import WireError
from seamless_verl.transport.codec import Message, Refused, decode_frame, decode_message, encode_message

MAX_FRAME = 1 << 30  # bytes: a prompt with the frames of its videos
MAX_GREETING = 4096  # bytes from a peer that has not identified itself
BATCH = 1 << 20  # bytes after which a frame is sent before the turn ends, so that back-pressure reaches the sender
HEADER = 4


class Connection(asyncio.Protocol, ABC):
    """`admitted` is whether the peer has proved its identity; before, only short frames are read."""

    def __init__(self) -> None:
        self.admitted = False
        self._loop = asyncio.get_running_loop()
        self._inbound, self._outbound, self._size = bytearray(), list[bytes](), 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._transport: asyncio.Transport | None = None
        self._reason = "the connection was closed"

    @abstractmethod
    def received(self, message: Message) -> None:
        """Raises ValueError or TypeError on a message that is not expected here."""

    @abstractmethod
    def disconnected(self, reason: str) -> None:
        """The connection is gone; a second call changes nothing."""

    @property
    def peer(self) -> str:
        name = self._transport and self._transport.get_extra_info("peername")
        return f"{name[0]}:{name[1]}" if name else "nobody"

    @property
    def closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    @property
    def unsent(self) -> bool:
        """Whether the peer has not read enough of what it was sent."""
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    async def writable(self) -> None:
        """Returns when the peer has read enough of what it was sent, or is gone."""
        await self._writable.wait()

    def send(self, message: Message) -> None:
        """Sends by the end of this turn of the loop, unless closed; WireError if it is longer than a frame may be."""
        raw = encode_message(message)
        if len(raw) + 3 * HEADER > MAX_FRAME:
            raise WireError(self.peer, f"a message of {len(raw)} bytes does not fit a frame of {MAX_FRAME}")
        if self._size + len(raw) > BATCH:
            self._flush()
        if not self._outbound:
            self._loop.call_soon(self._flush)
        self._outbound.append(raw)
        self._size += len(raw)

    def close(self, reason: str) -> None:
        """Closes the connection after everything was sent."""
        self._reason = reason
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def refuse(self, reason: str) -> None:
        """Sends the peer the reason and closes."""
        self.send(Refused(reason))
        self.close(str(WireError(self.peer, reason)))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        self.disconnected(f"{type(exc).__name__}: {exc}" if exc else self._reason)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._inbound += data
        try:
            while (messages := self._next_frame()) is not None:
                for message in messages:
                    if not self.closing:
                        self.received(decode_message(message))
        except (ValueError, TypeError) as error:  # msgspec's own are among them
            self.refuse(f"a malformed message: {error or type(error).__name__}")

    def _next_frame(self) -> list[Raw] | None:
        """The messages of the next whole frame; None until one has arrived."""
        if len(self._inbound) < HEADER:
            return None
        end = HEADER + int.from_bytes(self._inbound[:HEADER], "big")
        if end > (limit := MAX_FRAME if self.admitted else MAX_GREETING):
            raise ValueError(f"a frame of {end} bytes, {limit} are allowed")
        if len(self._inbound) < end:
            return None
        frame = bytes(memoryview(self._inbound)[HEADER:end])
        del self._inbound[:end]
        return decode_frame(frame)

    def _flush(self) -> None:
        messages, self._outbound, self._size = self._outbound, [], 0
        if messages and self._transport is not None and not self.closing:
            self._transport.write(_frame(messages))


def _frame(messages: list[bytes]) -> bytes:
    count = b"\xdd" + len(messages).to_bytes(4, "big")  # msgpack's array 32
    return (len(count) + sum(map(len, messages))).to_bytes(HEADER, "big") + count + b"".join(messages)
