"""The bench's client reads replies whole, however they are cut, and says what was refused."""

from __future__ import annotations

import asyncio

import pytest

from seamless_verl.tools.bench.gateway.load import BadReplyError, BenchConnection, http_request

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
REFUSED = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone"


async def reply_bodies(reply: bytes, size: int, times: int = 1) -> list[bytes]:
    """The received of replies that come so many bytes at a time, on one connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(times):
            await reader.readexactly(len(raw))
            for start in range(0, len(reply), size):
                writer.write(reply[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    raw, received = http_request("/x", b"{}"), []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        connection = await BenchConnection.open("127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            for _ in range(times):
                timing = await connection.send(raw)
                assert 0 < timing.first <= timing.whole
                received.append(bytes(connection.body))
        finally:
            connection.close()
    return received


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_a_reply_is_read_to_its_end_and_no_further(size: int) -> None:
    assert (await reply_bodies(WHOLE, size, times=3)) == [b"hello"] * 3
    assert (await reply_bodies(CHUNKS, size, times=3)) == [b"5\r\nhello\r\n0\r\n\r\n"] * 3


async def test_what_is_no_answer_is_an_error() -> None:
    with pytest.raises(BadReplyError, match="none"):
        await reply_bodies(REFUSED, 1000)
    with pytest.raises(BadReplyError, match="lost"):
        await reply_bodies(WHOLE[:-1], 1000)
