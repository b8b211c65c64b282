"""The transport: messages arrive as sent, unknown clients are refused, and errors stay with their connection."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rollout import TOKEN, settle, until
from support.routes import rows_of

from seamless_verl.errors import ReplicaLostError, WireError
from seamless_verl.rollout.engine import EngineRequest, EngineSource, PauseMode
from seamless_verl.tools.bench.stub_engine import StubEngine, stub_tokens
from seamless_verl.trajectory.records import Finish, TokenChunk, TopLogprobs, logprobs, merge_chunks, tokens
from seamless_verl.transport import EngineServer, RemoteEngine, serve_engine
from seamless_verl.transport.codec import (
    PROTOCOL,
    Chunk,
    Generate,
    Hello,
    Message,
    Refused,
    Welcome,
    chunk_message,
    decode_frame,
    decode_message,
    engine_request,
    generate_message,
    token_chunk,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False)


@asynccontextmanager
async def served(source: EngineSource, **more: Any) -> AsyncIterator[EngineServer]:
    server = await serve_engine(source, "127.0.0.1", 0, token=TOKEN, replica_id="a", **more)
    try:
        yield server
    finally:
        await server.close()


async def connect(server: EngineServer, **more: Any) -> RemoteEngine:
    settings: dict[str, Any] = {"token": TOKEN, "replica_id": "a", **more}
    return await RemoteEngine.connect("127.0.0.1", server.port, **settings)


@asynccontextmanager
async def connected(source: EngineSource, **more: Any) -> AsyncIterator[tuple[EngineServer, RemoteEngine]]:
    """A server with one client."""
    async with served(source) as server:
        engine = await connect(server, **more)
        yield server, engine
        engine.close()


def request(name: str = "c#0", max_tokens: int = 10, prompt: list[int] | None = None) -> EngineRequest:
    return EngineRequest(name, tokens(prompt or [1, 2]), {"max_tokens": max_tokens})


async def ids_of(engine: RemoteEngine, wanted: EngineRequest) -> list[int]:
    async with aclosing(engine.generate(wanted)) as chunks:
        return [token async for chunk in chunks for token in chunk.ids]


class Scripted:
    """Gives the same chunks to every request."""

    def __init__(self, *script: TokenChunk | Exception) -> None:
        self.script, self.given = script, 0
        self.requests: list[EngineRequest] = []

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        self.requests.append(request)
        for item in self.script:
            if isinstance(item, Exception):
                raise item
            self.given += 1
            yield item

    async def abort(self, request_id: str) -> None:
        pass


TOP = st.builds(TopLogprobs, st.tuples(INT32, INT32), st.tuples(FLOAT32, FLOAT32), st.integers(1, 99))
CHUNK = st.builds(
    lambda pairs, version, finish, reason, top, grammar, routed: TokenChunk(
        tokens(i for i, _ in pairs),
        logprobs(p for _, p in pairs),
        version,
        "",
        finish,
        reason,
        top,
        grammar=grammar[: len(pairs)],
        routes=rows_of(*range(len(pairs))) if routed else None,
        prompt_routes=rows_of(7, 8) if routed else None,
    ),
    st.lists(st.tuples(INT32, FLOAT32), max_size=5),
    st.integers(0, 1 << 40),
    st.none() | st.sampled_from(Finish),
    st.none() | INT32 | st.text(max_size=5),
    st.none() | st.lists(TOP, max_size=3).map(tuple),
    st.just(b"") | st.binary(min_size=5, max_size=5),
    st.booleans(),
)


def arrived(message: Message) -> Message:
    (found,) = decode_frame(msgspec.msgpack.encode([message]))
    return decode_message(found)


@given(chunk=CHUNK)
def test_a_chunk_arrives_as_it_was_with_the_replica_that_the_client_knows(chunk: TokenChunk) -> None:
    message = arrived(chunk_message(7, chunk))
    assert isinstance(message, Chunk) and message.call == 7
    assert token_chunk(message, "a") == replace(chunk, replica="a", top=chunk.top or None)


@given(chunks=st.lists(CHUNK, min_size=1, max_size=5), version=st.integers(0, 99))
def test_merged_chunks_are_all_of_their_tokens_and_the_last_ones_end(chunks: list[TokenChunk], version: int) -> None:
    chunks = [replace(chunk, version=version) for chunk in chunks]
    before = [(list(chunk.ids), list(chunk.logprobs)) for chunk in chunks]
    whole = merge_chunks(chunks)
    assert list(whole.ids) == [token for chunk in chunks for token in chunk.ids]
    assert whole.logprobs.tobytes() == b"".join(chunk.logprobs.tobytes() for chunk in chunks)
    assert list(whole.top or ()) == [entry for chunk in chunks for entry in chunk.top or ()]
    last = chunks[-1]
    assert (whole.version, whole.finish_reason, whole.stop_reason) == (version, last.finish_reason, last.stop_reason)
    assert before == [(list(chunk.ids), list(chunk.logprobs)) for chunk in chunks]


async def test_a_reader_that_is_behind_reads_waiting_chunks_as_one_for_each_version() -> None:
    script = [
        *(TokenChunk(tokens([token]), logprobs([token]), 0) for token in (1, 2, 3)),
        *(TokenChunk(tokens([token]), logprobs([token]), 1) for token in (4, 5)),
        TokenChunk(tokens([6]), logprobs([6]), 1, "", Finish.STOP, 6),
    ]
    async with connected(Scripted(*script)) as (_, engine):
        async with aclosing(engine.generate(request())) as chunks:
            found = [await anext(chunks)]
            await settle(200)
            found += [chunk async for chunk in chunks]
        assert len(found) <= 3
        assert [token for chunk in found for token in chunk.ids] == [1, 2, 3, 4, 5, 6]
        assert [version for chunk in found for version in [chunk.version] * len(chunk.ids)] == [0, 0, 0, 1, 1, 1]
        assert (found[-1].finish_reason, found[-1].stop_reason) == (Finish.STOP, 6)


@given(
    ids=st.lists(INT32, max_size=9),
    sampling=st.dictionaries(st.text(max_size=4), st.none() | FLOAT32 | st.dictionaries(INT32, FLOAT32, max_size=2)),
)
def test_a_request_arrives_as_it_was(ids: list[int], sampling: dict[str, Any]) -> None:
    sent = EngineRequest("name", array("i", ids), sampling, len(ids), "conversation", 7, routes_from=len(ids) or None)
    message = arrived(generate_message(7, sent))
    assert isinstance(message, Generate) and message.call == 7 and engine_request(message) == sent


async def test_many_calls_share_a_connection() -> None:
    stub = StubEngine("a", tokens_per_chunk=2)
    async with connected(stub) as (server, engine):
        names = [f"c{number}" for number in range(40)]
        found = await asyncio.gather(*(ids_of(engine, request(n, 30, [len(n), k])) for k, n in enumerate(names)))
        assert found == [stub_tokens([len(n), k], 30) for k, n in enumerate(names)]
        assert len(server.connections) == 1 and not server.tasks


async def test_a_prompt_larger_than_any_buffer() -> None:
    stub, prompt = StubEngine("a"), list(range(1 << 20))
    async with connected(stub) as (_, engine):
        both = (ids_of(engine, request("1", 3, prompt)), ids_of(engine, request("2", 3, prompt[1:])))
        assert await asyncio.gather(*both) == [stub_tokens(prompt, 3), stub_tokens(prompt[1:], 3)]


async def test_a_message_larger_than_a_frame_is_refused_before_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with connected(StubEngine("a")) as (_, engine):
        monkeypatch.setattr("seamless_verl.transport.connection.MAX_FRAME", 4096)
        with pytest.raises(WireError, match="does not fit a frame"):
            await ids_of(engine, request("1", 3, list(range(2000))))
        assert await ids_of(engine, request("2", 3)) == stub_tokens([1, 2], 3)


async def test_leaving_a_call_aborts_it_in_the_engine() -> None:
    stub = StubEngine("a")
    async with connected(stub) as (_, engine):
        async with aclosing(engine.generate(request(max_tokens=10**9))) as chunks:
            await anext(chunks)
        assert await ids_of(engine, request("next", 3)) == stub_tokens([1, 2], 3)  # it is sent after the Drop
        assert stub.running == 0


async def test_a_lost_connection_ends_every_call_and_is_reported_once() -> None:
    stub, reasons = StubEngine("a"), list[str]()
    await stub.pause(PauseMode.KEEP)
    async with connected(stub, on_lost=reasons.append) as (server, engine):
        running = [asyncio.create_task(ids_of(engine, request(f"c{n}"))) for n in range(3)]
        await until(lambda: stub.running == 3)
        await server.close()
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            assert isinstance(outcome, ReplicaLostError) and outcome.replica == "a"
        assert stub.running == 0 and len(reasons) == 1
        with pytest.raises(ReplicaLostError):
            await ids_of(engine, request("late"))


async def test_a_client_that_vanishes_leaves_nothing_running_and_others_continue() -> None:
    stub = StubEngine("a")
    async with served(stub) as server:
        staying, going = await connect(server), await connect(server)
        async with (
            aclosing(staying.generate(request("stays", 10**9))) as stays,
            aclosing(going.generate(request("goes", 10**9))) as goes,
        ):
            await anext(stays), await anext(goes)
            going.close()
            while len(server.connections) == 2 or stub.running == 2:
                await anext(stays)
            with pytest.raises(ReplicaLostError, match="closed on this side"):
                while True:
                    await anext(goes)
        staying.close()


async def test_what_had_arrived_is_given_before_the_loss() -> None:
    stub = StubEngine("a")
    async with connected(stub) as (server, engine):
        chunks = engine.generate(request(max_tokens=10**9))
        found = [*(await anext(chunks)).ids]
        await until(lambda: stub.produced >= 50)
        await server.close()
        await settle()
        with pytest.raises(ReplicaLostError):
            while True:
                found += (await anext(chunks)).ids
        assert found == stub_tokens([1, 2], len(found)) and len(found) >= 49


async def test_a_client_that_does_not_read_stops_its_calls_and_no_others() -> None:
    filler = TokenChunk(tokens(range(5000)), logprobs([0] * 5000), 0)
    source = Scripted(*[filler] * 2000, TokenChunk(tokens([1]), logprobs([0]), 0, "", Finish.LENGTH))
    async with served(source) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        messages = [Hello(PROTOCOL, TOKEN), generate_message(0, request())]
        writer.write(framed(*messages))
        last = -1
        while last != source.given:
            last = source.given
            await settle(200)
        assert 0 < source.given < 1000
        before = source.given
        other = await connect(server)
        async with aclosing(other.generate(request("other"))) as chunks:
            assert sum([len(chunk.ids) async for chunk in chunks]) == 2000 * 5000 + 1
        assert source.given - before < 2001 + 1000
        other.close()
        writer.close()


async def test_a_lost_engine_and_a_defect_end_only_their_call() -> None:
    first = TokenChunk(tokens([4]), logprobs([0]), 0)
    async with connected(Scripted(first, ReplicaLostError("inner", "engine core died"))) as (server, engine):
        chunks = engine.generate(request())
        assert await anext(chunks) == replace(first, replica="a")
        with pytest.raises(ReplicaLostError, match="replica a is lost: engine core died"):
            await anext(chunks)
        server.source = Scripted(first, ZeroDivisionError("nought"))
        found = [chunk async for chunk in engine.generate(request())]
        assert (found[-1].finish_reason, found[-1].stop_reason) == (Finish.FAILED, "ZeroDivisionError: nought")


async def test_a_call_that_waits_to_be_sent_gets_the_loss() -> None:
    async with connected(StubEngine("a")) as (server, engine):
        engine._connection.pause_writing()
        waiting = asyncio.create_task(ids_of(engine, request()))
        await settle()
        await server.close()
        with pytest.raises(ReplicaLostError):
            await asyncio.wait_for(waiting, 10)


async def test_calls_that_wait_for_a_peer_that_reads_nothing_get_the_loss_when_it_is_given_up() -> None:
    """A host that vanished, or a server that hangs: nothing more comes from it, not even an end."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)  # of the Hello
        writer.write(framed(Welcome("a")))
        writer.transport.pause_reading()
        await closing.wait()
        writer.close()

    closing = asyncio.Event()
    async with await asyncio.start_server(greet, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        engine = await RemoteEngine.connect("127.0.0.1", port, token=TOKEN, replica_id="a")
        calls = [asyncio.create_task(ids_of(engine, request(f"c#{n}", prompt=[1] * 1_000_000))) for n in range(7)]
        while engine._connection._writable.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
        await settle()
        engine.close()
        ends = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert [type(end) for end in ends] == [ReplicaLostError] * len(calls)
        assert engine._connection.closing
        closing.set()


async def test_clients_without_the_token_are_refused() -> None:
    async with served(StubEngine("a")) as server:
        with pytest.raises(WireError, match="the token is not the one"):
            await connect(server, token="wrong")
        with pytest.raises(WireError, match="found 'a'"):
            await connect(server, replica_id="b")
        await settle()
        assert not server.connections


def framed(*messages: Any) -> bytes:
    body = msgspec.msgpack.encode(messages)
    return len(body).to_bytes(4, "big") + body


async def reply(server: EngineServer, *sent: bytes) -> list[Message]:
    """What the server replies to these bytes before it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for raw in sent:
        writer.write(raw)
    raw, messages_read = await reader.read(), []
    while raw:
        end = 4 + int.from_bytes(raw[:4], "big")
        messages_read += map(decode_message, decode_frame(raw[4:end]))
        raw = raw[end:]
    writer.close()
    return messages_read


HELLO = framed(Hello(PROTOCOL, TOKEN))
GENERATE = Generate(0, "c", b"\0" * 4, {"max_tokens": 10**9}, 0, "", 0)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (framed(GENERATE), "send Hello first"),
        (framed(Hello(99, TOKEN)), "protocol 99"),
        ((5000).to_bytes(4, "big"), "5004 bytes, 4096 are allowed"),
        (HELLO + b"\xff" * 8, "are allowed"),
        (HELLO + b"\0\0\0\4\xc1\xc1\xc1\xc1", "malformed"),
        (HELLO + b"\0\0\0\2\x92\x01", "malformed"),
        (HELLO + framed(5), "Expected `array`, got `int`"),
        (HELLO + framed([]), "malformed"),
        (HELLO + framed([99, 1]), "Invalid value 99"),
        (HELLO + HELLO, "Hello is not expected"),
        (HELLO + framed(GENERATE, GENERATE), "Generate is not expected"),
        (HELLO + framed(Generate(0, "c", b"123", {}, 0, "", 0)), "malformed"),
        (HELLO + framed([2, 0, "c", 5, {}, 0, "", 0]), "Expected `bytes`, got `int`"),
        (HELLO + framed([2, 0, 7, b"", {}, 0, "", 0]), "Expected `str`, got `int`"),
        (HELLO + framed([2, 0, "c", b"", {}, 0, 7, 0]), "Expected `str`, got `int`"),
        (HELLO + framed([2, 0, "c", b"", {}, 0, "", ""]), "Expected `int`, got `str`"),
        (HELLO + framed([2, 0, "c", b"", {}, 0]), "Expected `array` of at least length 8, got 6"),
    ],
)
async def test_a_malformed_message_closes_its_connection_with_the_reason(sent: bytes, reason: str) -> None:
    stub = StubEngine("a")
    async with connected(stub) as (server, engine):
        *_, last = await asyncio.wait_for(reply(server, sent), 10)
        assert isinstance(last, Refused) and reason in last.reason
        assert await ids_of(engine, request("3", 3)) == stub_tokens([1, 2], 3)
        assert len(server.connections) == 1 and stub.running == 0


async def test_what_came_before_a_malformed_message_of_the_same_frame_is_received() -> None:
    async with served(StubEngine("a")) as server:
        welcome, refused = await asyncio.wait_for(reply(server, framed(Hello(PROTOCOL, TOKEN), 5)), 10)
        assert welcome == Welcome("a") and isinstance(refused, Refused) and "got `int`" in refused.reason


@settings(max_examples=150, deadline=None)
@given(junk=st.binary(min_size=1, max_size=40), greeted=st.booleans(), whole=st.booleans())
def test_no_bytes_harm_the_server(junk: bytes, greeted: bool, whole: bool) -> None:
    async def case() -> None:
        async with served(StubEngine("a"), greeting_s=60) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write((HELLO if greeted else b"") + (len(junk).to_bytes(4, "big") if whole else b"") + junk)
            await settle(3)
            engine = await connect(server)
            assert await ids_of(engine, request(max_tokens=3)) == stub_tokens([1, 2], 3)
            engine.close()
            writer.close()

    problems: list[Any] = []
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    loop.run_until_complete(case())
    loop.run_until_complete(settle())
    loop.close()
    assert problems == []


async def test_a_client_that_sends_no_hello_is_refused() -> None:
    async with served(StubEngine("a"), greeting_s=0.05) as server:
        assert await asyncio.wait_for(reply(server), 10) == [Refused("no Hello came in time")]
        engine = await connect(server)
        await asyncio.sleep(0.1)
        assert len(server.connections) == 1
        engine.close()


@pytest.mark.parametrize("finish", [None, Finish.STOP])
async def test_a_server_with_malformed_messages_is_a_lost_replica(finish: Finish | None) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(framed(Welcome("a")))
        await reader.readexactly(len(HELLO))
        writer.write(framed(Chunk(0, b"123", b"", 0, finish, None, None)))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    reasons: list[str] = []
    port = server.sockets[0].getsockname()[1]
    engine = await RemoteEngine.connect("127.0.0.1", port, token=TOKEN, replica_id="a", on_lost=reasons.append)
    with pytest.raises(ReplicaLostError, match="malformed"):
        await ids_of(engine, request())
    assert len(reasons) == 1
    server.close()


async def test_chunks_of_one_turn_are_sent_in_one_write() -> None:
    stub = StubEngine("a")
    async with connected(stub) as (server, engine):
        running = [asyncio.create_task(ids_of(engine, request(f"c{n}", 200))) for n in range(16)]
        await until(lambda: stub.running == 16)
        (connection,) = server.connections
        transport, writes = connection._transport, []
        assert transport is not None
        write = transport.write
        transport.write = lambda data: (writes.append(data), write(data))[1]  # type: ignore[method-assign]
        await asyncio.gather(*running)
        assert len(writes) < 16 * 200 / 8
