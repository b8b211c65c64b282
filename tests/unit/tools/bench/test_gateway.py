"""The gateway's bench: its client reads replies whole, and figures are made from them."""

from __future__ import annotations

import asyncio
import json
from statistics import mean

import pytest

from seamless_verl.tools.bench.gateway import HEADER, Measurement, Window, report_rows, report_table, window_of
from seamless_verl.tools.bench.load import (
    AT_ONCE,
    STEADY,
    BadReplyError,
    BenchConnection,
    BenchRequest,
    Callers,
    ReplyTiming,
    Shape,
    http_request,
    shapes,
)

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


APART = Shape(32, False, Callers.APART)


def test_callers_in_step_begin_together_and_ask_for_replies_of_one_length() -> None:
    shape = Shape(32, True)
    assert {shape.start_delay_s(caller, STEADY) for caller in range(32)} == {0.0}
    (request,) = shape.requests(STEADY)
    assert json.loads(request.body)["max_tokens"] == 32 and json.loads(request.body)["stream"]
    assert request.engine_s == pytest.approx(0.64)


def test_callers_apart_begin_over_one_replys_time_and_lengths_are_drawn_alike_for_every_arm() -> None:
    begins = [APART.start_delay_s(caller, STEADY) for caller in range(32)]
    assert begins == pytest.approx([caller * 0.02 for caller in range(32)])
    requests = APART.requests(STEADY)
    assert requests == APART.requests(STEADY)
    lengths = [json.loads(item.body)["max_tokens"] for item in requests]
    assert 16 <= min(lengths) < max(lengths) <= 48 and mean(lengths) == pytest.approx(32, rel=0.1)
    assert [item.engine_s for item in requests] == pytest.approx([length * 0.02 for length in lengths])


def test_replies_at_once_have_no_time_to_be_spread_over() -> None:
    assert [item.name for item in shapes(AT_ONCE)] == [
        "1 whole",
        "1 streamed",
        "32 in step, whole",
        "32 in step, streamed",
    ]
    names = [item.name for item in shapes(STEADY)]
    assert names[4:] == ["32 apart, whole", "32 apart, streamed"] and len(set(names)) == 6


def test_added_latency_is_over_what_the_engine_takes_for_each_length() -> None:
    short, long = (BenchRequest.of(STEADY, tokens, stream=False) for tokens in (16, 48))

    def window(late: float, *requests: BenchRequest) -> Window:
        return window_of([(ReplyTiming(0.01 + late, item.engine_s + late), item) for item in requests], 1.0, 0.1)

    # The gateway happened to be asked for long replies more often, which is nothing that it adds.
    windows = {"direct": [window(0.001, short, short, long)], "gateway": [window(0.004, short, long, long)]}
    measurement = Measurement(STEADY, APART, windows)
    direct, gateway = report_rows([measurement])
    assert gateway["p50_ms"] == pytest.approx(964) and direct["p50_ms"] == pytest.approx(321)
    for what in ("first_p50", "first_p99", "p50", "p99"):
        assert gateway[f"added_{what}_ms"] == pytest.approx(3)
    assert (gateway["callers"], gateway["concurrent"]) == ("apart", 32)
    assert report_table([measurement]).splitlines()[0].split("  ")[0].strip() == HEADER[0]
