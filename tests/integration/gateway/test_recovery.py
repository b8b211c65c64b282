"""A gateway that is started again over its journal: retries get what they would have got without its death."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.gateway_restart import ADMIN, CHAT, decode, expected_ids, generated_ids, open_session, run_gateway
from support.routes import marks, row_behind

from seamless_verl.errors import JournalOrderError
from seamless_verl.gateway.outputs import STREAM_INTERVAL
from seamless_verl.gateway.request_context import digest_of
from seamless_verl.gateway.session import hash_key
from seamless_verl.journal import (
    CallEnded,
    CallStarted,
    ChunkAppended,
    Event,
    HandedOver,
    HandOverBegun,
    SessionOpened,
    SqliteJournal,
    StoredCall,
)
from seamless_verl.journal.reader import read_closed_session
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Finish, TokenChunk, logprobs, tokens
from seamless_verl.trajectory.sequences import assemble
from seamless_verl.trajectory.session import Closed, SessionRecord

pytestmark = pytest.mark.integration
LENGTH = 12
BODY: dict[str, Any] = {
    "model": "nano",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": LENGTH,
    "return_token_ids": True,
}
RETRY = {"x-stainless-retry-count": "1"}


@asynccontextmanager
async def http_client() -> AsyncGenerator[httpx.AsyncClient, None]:
    """For one test, of at most 300 seconds."""
    async with asyncio.timeout(300), httpx.AsyncClient(timeout=30) as http:
        yield http


async def until(true: Callable[[], bool]) -> None:
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.005)  # another thread does it; the test's timeout bounds this


def describe(reply: httpx.Response) -> Any:
    """What a reply says, less what names it."""
    assert reply.status_code == 200, reply.text
    if "text/event-stream" not in reply.headers["content-type"]:
        body = reply.json()
        return body["choices"], body["usage"]
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    text = ""
    ids: list[int] = []
    ends: list[tuple[Any, Any]] = []
    for line in lines:
        for choice in json.loads(line)["choices"]:
            text += choice["delta"].get("content") or ""
            ids += choice.get("token_ids") or []
            ends.append((choice["finish_reason"], choice.get("stop_reason")))
    return text, ids, ends[-1]


def copy_call(call: StoredCall, name: str, kept: int | None, settings: dict[str, Any], size: int = 3) -> list[Event]:
    """The call in a session of that name, cut after `kept` tokens, or with its end."""
    events: list[Event] = [
        SessionOpened(name, "prompt", {**settings, "key": hash_key(name).hex()}, 0.0),
        CallStarted(name, f"{name}.1", call.digest, call.prompt_ids, call.request),
    ]
    ids, values = generated_ids(call), [value for segment in call.segments for value in segment.logprobs]
    number = len(ids) if kept is None else kept
    for start in range(0, number, size):
        part = slice(start, min(start + size, number))
        chunk = TokenChunk(tokens(ids[part]), logprobs(values[part]), start // 6, "of old")
        events.append(ChunkAppended(f"{name}.1", chunk))
    if kept is None:
        assert call.finish is not None
        events.append(CallEnded(f"{name}.1", call.finish, call.reply))
    return events


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"logprobs": True}, {"stop": "stop"}], ids=str)
async def test_a_retry_gets_the_whole_reply_wherever_a_call_was_cut(
    nano: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    async with http_client() as http:
        body, cuts = {**BODY, **more}, [*range(LENGTH + 1), None]
        with SqliteJournal(tmp_path / "one.sqlite") as journal:
            async with run_gateway(nano / "model", journal) as first:
                if "stop" in more:
                    whole = await http.post(
                        f"{(await open_session(http, first.gateway.url))['base_url']}/chat/completions", json=BODY
                    )
                    body["stop"] = whole.json()["choices"][0]["message"]["content"][5:8]
                session = await open_session(http, first.gateway.url, limits={"max_tokens": LENGTH + 3})
                wanted = await http.post(f"{session['base_url']}/chat/completions", json=body)
            record = journal.read(session["session_id"])
            assert record is not None
            call = record.calls[0]
        with SqliteJournal(tmp_path / "other.sqlite") as journal:
            cuts = [kept for kept in cuts if kept is None or kept <= len(generated_ids(call))]
            for kept in cuts:
                await journal.append(*copy_call(call, f"s{kept}", kept, record.settings))
            async with run_gateway(nano / "model", journal) as again:
                for kept in cuts:
                    url = f"{again.gateway.url}/s/s{kept}{CHAT}"
                    before = again.sampled
                    reply = await http.post(url, json=body, headers=RETRY)
                    session_now = again.gateway.table.get(f"s{kept}")
                    ids = generated_ids(call)
                    assert describe(reply) == describe(wanted), kept
                    assert again.sampled - before <= LENGTH - (kept or 0)
                    assert (session_now.turns, session_now.tokens, session_now.requests) == (1, len(ids), 2)
                    check(journal, f"s{kept}", call, again.recorder.record(f"s{kept}"))
                    if kept is None:
                        assert again.sampled == before
                again.calls.check_integrity()
            journal.check_integrity()


async def test_a_token_that_ended_a_reply_is_no_text_of_its_retry(nano: Path, tmp_path: Path) -> None:
    """Such as the end of a turn where special tokens are text, which parsers of tool calls ask for."""
    async with http_client() as http:
        with SqliteJournal(tmp_path / "one.sqlite") as journal:
            async with run_gateway(nano / "model", journal) as first:
                session = await open_session(http, first.gateway.url)
                await http.post(f"{session['base_url']}/chat/completions", json=BODY)
            record = journal.read(session["session_id"])
            assert record is not None
            (call,) = record.calls
        ids = generated_ids(call)
        stopped = replace(call, finish=Finish.STOP, reply={**call.reply, "stop_reason": ids[-1]})
        body = {**BODY, "skip_special_tokens": False}
        with SqliteJournal(tmp_path / "other.sqlite") as journal:
            stopped = replace(stopped, digest=digest_of("/v1/chat/completions", body))
            await journal.append(*copy_call(stopped, "s", None, record.settings))
            async with run_gateway(nano / "model", journal) as again:
                reply = await http.post(f"{again.gateway.url}/s/s{CHAT}", json=body, headers=RETRY)
                (choice,) = reply.json()["choices"]
                assert again.sampled == 0 and choice["token_ids"] == ids
                assert (choice["message"]["content"], choice["finish_reason"]) == (decode(ids[:-1]), "stop")


def check(journal: SqliteJournal, name: str, call: StoredCall, kept: SessionRecord) -> None:
    """The journal and the record both hold the call once, as it was expected_ids."""
    record = journal.read(name)
    assert record is not None
    (stored,) = record.calls
    assert (generated_ids(stored), stored.finish, stored.reply) == (generated_ids(call), call.finish, call.reply)
    assert stored.request == call.request
    assert [turn.generated_ids() for turn in kept.turns] == [tokens(generated_ids(call))]
    assert rebuild_record(record).turns[0].generated_ids() == kept.turns[0].generated_ids()
    kept.check_integrity()


async def test_an_sdk_sees_only_a_longer_call(nano: Path, tmp_path: Path) -> None:
    async with http_client() as http:
        path = tmp_path / "journal.sqlite"
        journal = SqliteJournal(path)
        async with run_gateway(nano / "model", journal, delay_s=0.01, grace=0) as first:
            url = first.gateway.url
            session = await open_session(http, url, limits={"max_turns": 1, "max_tokens": 60})
            client = openai.AsyncOpenAI(base_url=session["base_url"], api_key="unused", max_retries=9)
            asking = asyncio.create_task(
                client.chat.completions.create(model="nano", messages=BODY["messages"], max_tokens=60)
            )
            await until(lambda: first.sampled > 2 * STREAM_INTERVAL)
            journal.close()  # from here on it is as if it were dead: nothing more is on record, or shown
        sampled = first.sampled
        with SqliteJournal(path) as journal:
            async with run_gateway(nano / "model", journal, port=int(url.rpartition(":")[2])) as again:
                text = (await asking).choices[0].message.content
                await client.close()
                view = again.gateway.table.get(session["session_id"]).describe()
                record = journal.read(session["session_id"])
                assert record is not None
                (call,) = record.calls
                assert generated_ids(call) == expected_ids(call, 60) and text == decode(generated_ids(call))
                assert (view["turns"], view["tokens"]) == (1, 60)
                assert 60 - sampled <= again.sampled <= 60 - STREAM_INTERVAL, "it went on from the beginning"


async def test_each_position_keeps_its_route_over_a_death_and_into_a_later_turn(nano: Path, tmp_path: Path) -> None:
    """Cut in its first call by the death of its process; the second call asks for the routes of what is new."""
    async with http_client() as http:
        path = tmp_path / "journal.sqlite"
        journal = SqliteJournal(path)
        async with run_gateway(nano / "model", journal, delay_s=0.01, grace=0, routes=True) as first:
            url = first.gateway.url
            session = await open_session(http, url)
            client = openai.AsyncOpenAI(base_url=session["base_url"], api_key="unused", max_retries=9)
            messages: list[Any] = [*BODY["messages"]]
            asking = asyncio.create_task(client.chat.completions.create(model="nano", messages=messages, max_tokens=60))
            await until(lambda: first.sampled > 2 * STREAM_INTERVAL)
            journal.close()  # from here on it is as if it were dead
        with SqliteJournal(path) as journal:
            async with run_gateway(nano / "model", journal, port=int(url.rpartition(":")[2]), routes=True) as again:
                reply = (await asking).choices[0].message.content
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]
                await client.chat.completions.create(model="nano", messages=messages, max_tokens=8)
                await client.close()
                record = again.recorder.record(session["session_id"])
            stored = journal.read(session["session_id"])
            assert stored is not None
            requests = [request for stub in again.stubs for request in stub.seen]
            asked = {len(request.prompt_ids) - (request.routes_from or 0) for request in requests}
            for one in (record, rebuild_record(stored)):
                (sequence,) = assemble(one, TrainAll(), 0).sequences
                ids = [*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()]
                assert sequence.routes is not None and len(sequence.turn_ids) == 2
                assert marks(sequence.routes) == [row_behind(ids[:number]) for number in range(1, len(ids))]
            assert len(asked) == 2 and min(asked) == 0 and max(asked) < 60, "the first call asks for none of its own"


async def test_a_conversation_continues_its_recorded_ids(nano: Path, tmp_path: Path) -> None:
    async with http_client() as http:
        with SqliteJournal(tmp_path / "journal.sqlite") as journal:
            async with run_gateway(nano / "model", journal) as first:
                session = await open_session(http, first.gateway.url)
                key, body = session["key"], dict(BODY)
                reply = await http.post(f"{first.gateway.url}/s/{key}{CHAT}", json=body)
                messages = [
                    *BODY["messages"],
                    reply.json()["choices"][0]["message"],
                    {"role": "user", "content": "go on"},
                ]
            async with run_gateway(nano / "model", journal) as again:
                body["messages"] = [{"role": one["role"], "content": one["content"]} for one in messages]
                assert (await http.post(f"{again.gateway.url}/s/{key}{CHAT}", json=body)).status_code == 200
                record = journal.read(session["session_id"])
                assert record is not None
                one, two = record.calls
                before = [*one.prompt_ids, *generated_ids(one)]
                assert two.prompt_ids.tolist()[: len(before)] == before
                assert [call.call_id.rpartition(".")[2] for call in record.calls] == ["1", "2"]
                tree = again.recorder.record(session["session_id"]).tree
                assert tree.turns[two.call_id].match_end is tree.turns[one.call_id].end


async def test_an_idempotency_key_outlives_the_gateway_and_a_fresh_request_is_a_new_sample(
    nano: Path, tmp_path: Path
) -> None:
    async with http_client() as http:
        headers = {"idempotency-key": "k"}
        with SqliteJournal(tmp_path / "journal.sqlite") as journal:
            async with run_gateway(nano / "model", journal) as first:
                session = await open_session(http, first.gateway.url)
                wanted = await http.post(f"{session['base_url']}/chat/completions", json=BODY, headers=headers)
            async with run_gateway(nano / "model", journal) as again:
                url = f"{again.gateway.url}/s/{session['key']}{CHAT}"
                for _ in range(2):
                    assert describe(await http.post(url, json=BODY, headers=headers)) == describe(wanted)
                assert again.sampled == 0
                other = await http.post(url, json={**BODY, "seed": 1}, headers=headers)
                assert other.status_code == 422
                assert (await http.post(url, json=BODY)).status_code == 200
                record = journal.read(session["session_id"])
                assert record is not None and len(record.calls) == 2


async def test_each_choice_of_a_request_continues_where_it_was_cut(nano: Path, tmp_path: Path) -> None:
    async with http_client() as http:
        body = {**BODY, "n": 3}
        with SqliteJournal(tmp_path / "one.sqlite") as journal:
            async with run_gateway(nano / "model", journal) as first:
                session = await open_session(http, first.gateway.url)
                wanted = await http.post(f"{session['base_url']}/chat/completions", json=body)
            record = journal.read(session["session_id"])
            assert record is not None and len(record.calls) == 3
        with SqliteJournal(tmp_path / "other.sqlite") as journal:
            whole, cut, _ = record.calls  # the third had not begun
            ended = copy_call(whole, "s", None, record.settings)
            moved: list[Any] = copy_call(cut, "s", 5, record.settings)[1:]
            await journal.append(*ended, *(replace(event, call_id="s.1-1") for event in moved))
            async with run_gateway(nano / "model", journal) as again:
                reply = await http.post(f"{again.gateway.url}/s/s{CHAT}", json=body, headers=RETRY)
                assert describe(reply) == describe(wanted)
                assert again.sampled == LENGTH - 5 + LENGTH
                now = journal.read("s")
                assert now is not None
                assert [call.call_id for call in now.calls] == ["s.1", "s.1-1", "s.2-2"]
                assert [call.request["gateway"]["attempt"] for call in now.calls] == [1, 1, 1]
                assert again.gateway.table.get("s").turns == 1


async def test_a_call_without_a_retry_ends_with_its_session(nano: Path, tmp_path: Path) -> None:
    async with http_client() as http:
        with SqliteJournal(tmp_path / "one.sqlite") as journal:
            async with run_gateway(nano / "model", journal) as first:
                session = await open_session(http, first.gateway.url)
                await http.post(f"{session['base_url']}/chat/completions", json=BODY)
            record = journal.read(session["session_id"])
            assert record is not None
        with SqliteJournal(tmp_path / "other.sqlite") as journal:
            await journal.append(*copy_call(record.calls[0], "s", 5, record.settings))
            late = {**record.settings, "limits": {"lifetime": 1.0}}
            await journal.append(*copy_call(record.calls[0], "late", 4, late))
            async with run_gateway(nano / "model", journal) as again:
                assert (
                    await http.post(f"{again.gateway.url}/s/late{CHAT}", json=BODY, headers=RETRY)
                ).status_code == 410
                await http.post(f"{again.gateway.url}/admin/sessions/s/close", json={}, headers=ADMIN)
                await until(lambda: not again.recorder.record("late").is_open)
                assert again.recorder.take("late").closed is Closed.EXPIRED
                kept = again.recorder.take("s")
            stored_session = journal.read("s")
            assert (
                stored_session is not None and stored_session.calls[0].finish is Finish.CANCELLED and again.sampled == 0
            )
            assert generated_ids(stored_session.calls[0]) == generated_ids(record.calls[0])[:5]
            await check_handed_once(journal, kept)


async def test_a_retry_that_was_refused_may_come_again(nano: Path, tmp_path: Path) -> None:
    async with http_client() as http:
        with SqliteJournal(tmp_path / "one.sqlite") as journal:
            async with run_gateway(nano / "model", journal) as first:
                session = await open_session(http, first.gateway.url, limits={"max_concurrent": 1})
                wanted = await http.post(f"{session['base_url']}/chat/completions", json=BODY)
            record = journal.read(session["session_id"])
            assert record is not None
        with SqliteJournal(tmp_path / "other.sqlite") as journal:
            await journal.append(*copy_call(record.calls[0], "s", 5, record.settings))
            async with run_gateway(nano / "model", journal) as again:
                session_now, url = again.gateway.table.get("s"), f"{again.gateway.url}/s/s{CHAT}"
                session_now.running += 1
                assert (await http.post(url, json=BODY, headers=RETRY)).status_code == 429
                session_now.running -= 1
                reply = await http.post(url, json=BODY, headers={"x-stainless-retry-count": "2"})
                assert describe(reply) == describe(wanted)
                stored_session = journal.read("s")
                assert stored_session is not None and len(stored_session.calls) == 1


async def check_handed_once(journal: SqliteJournal, kept: SessionRecord) -> None:
    """It is given again, the same, until it was handed over; and then never."""
    for _ in range(2):
        given = read_closed_session(journal, "s")
        assert [turn.generated_ids() for turn in given.turns] == [turn.generated_ids() for turn in kept.turns]
        assert (given.closed, read_closed_session(journal, "late").closed) == (kept.closed, Closed.EXPIRED)
        with suppress(JournalOrderError):  # the second time it has begun
            await journal.append(HandOverBegun("s"))
    await journal.append(HandedOver("s", 0.0))
    with pytest.raises(JournalOrderError, match="the session is handed"):
        read_closed_session(journal, "s")
