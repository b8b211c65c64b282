"""The recorder: nothing is shown before it is on record, and every call that began has its end."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateway import EOS, GatewayHarness, Reply, gateway_harness, user
from support.rollout import until

from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.running_call import RunningCall
from seamless_verl.journal import SqliteJournal
from seamless_verl.trajectory.records import Finish

pytestmark = pytest.mark.integration
CHAT = {"model": "nano", "messages": [user("hi")]}
HELLO = [*b"hello", EOS]


def chat(harness: GatewayHarness, *, stream: bool = False, **options: Any) -> Any:
    return harness.http.post(
        harness.session["base_url"] + "/chat/completions", json={**CHAT, "stream": stream}, **options
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_on_record_is_not_shown(nano: Path, stream: bool) -> None:
    async with gateway_harness(nano) as harness:
        harness.recorder.gate = asyncio.Event()
        harness.source.replies = [Reply(HELLO, size=2)]
        seen: list[str] = []

        async def read() -> None:
            url, body = harness.session["base_url"] + "/chat/completions", {**CHAT, "stream": stream}
            async with harness.http.stream("POST", url, json=body) as reply:
                async for line in reply.aiter_lines():
                    seen.append(line)

        reading = asyncio.create_task(read())
        await harness.source.started.wait()
        await asyncio.sleep(0.2)
        early = list(seen)
        harness.recorder.gate.set()
        assert not any("hel" in line or '"he"' in line for line in early)
        await asyncio.wait_for(reading, 10)
        assert any("o" in line for line in seen)
        assert harness.recorder.ids(harness.source.calls[0].call_id) == HELLO


async def test_the_end_is_on_record_before_the_last_token_is_shown(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        order: list[str] = []
        ended, deliver = harness.recorder.end_call, asyncio.Event()

        async def slow(*args: Any) -> None:
            await deliver.wait()
            order.append("on record")
            await ended(*args)

        harness.recorder.end_call = slow  # type: ignore[method-assign]
        asking = asyncio.create_task(chat(harness))
        await harness.source.started.wait()
        await asyncio.sleep(0.1)
        early = asking.done()
        deliver.set()
        assert not early
        assert (await asking).status_code == 200 and order == ["on record"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_vanishes_cancels_its_call(nano: Path, stream: bool) -> None:
    async with gateway_harness(nano) as harness:
        harness.source.replies = [Reply(HELLO, hold=asyncio.Event())]
        async with httpx.AsyncClient(timeout=30) as client:
            url, body = harness.session["base_url"] + "/chat/completions", {**CHAT, "stream": stream}
            asking = asyncio.create_task(client.post(url, json=body))
            await harness.source.started.wait()
            await until(lambda: harness.recorder.ids(harness.source.calls[0].call_id) == [104])
            asking.cancel()
            await asyncio.wait([asking])
        await asyncio.wait_for(harness.drain(), 10)
        call = harness.source.calls[0]
        assert harness.recorder.ends() == [(call.call_id, Finish.CANCELLED, {"text": "h"})]
        assert harness.recorder.ids(call.call_id) == [104]
        assert harness.source.aborted == [call.call_id]
        assert harness.gateway.table.running == 0


async def test_a_call_that_is_cancelled_before_its_first_step_ends_its_request(
    nano: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a session that is closed in the same turn of the loop."""
    start = RunningCall.start

    def cancelled(call: RunningCall) -> asyncio.Task[None]:
        task = start(call)
        call.cancel()
        return task

    async with gateway_harness(nano) as harness:
        with monkeypatch.context() as patch:
            patch.setattr(RunningCall, "start", cancelled)
            assert (await asyncio.wait_for(chat(harness), 10)).status_code == 500
        assert harness.gateway.table.running == 0 and not harness.source.calls
        assert [event[0] for event in harness.recorder.events] == ["opened", "refused"]
        assert (await chat(harness, headers={"x-stainless-retry-count": "1"})).status_code == 200


async def test_closing_a_session_ends_its_calls_first(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.source.replies = [Reply(HELLO, hold=asyncio.Event())]
        asking = asyncio.create_task(chat(harness))
        await harness.source.started.wait()
        await asyncio.sleep(0.1)
        await harness.admin("POST", f"sessions/{harness.session['session_id']}/close", {})
        assert (await asking).status_code == 500
        kinds = [event[0] for event in harness.recorder.events if event[0] != "refused"]
        assert kinds[-2:] == ["ended", "closed"] and harness.recorder.ends()[0][1] is Finish.CANCELLED


async def test_a_session_that_ends_while_a_request_is_rendered_starts_no_call(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        renderer = harness.gateway.client.renderer
        render = renderer.render_chat_async

        async def closing(*args: Any, **options: Any) -> Any:
            await harness.admin("POST", f"sessions/{harness.session['session_id']}/close", {})
            return await render(*args, **options)

        renderer.render_chat_async = closing
        assert (await chat(harness)).status_code == 410
        assert [event[0] for event in harness.recorder.events] == ["opened", "closed", "refused"]


async def test_a_record_that_fails_fails_the_call_and_shows_nothing(nano: Path) -> None:
    async with gateway_harness(nano) as harness:

        async def broken(*args: Any) -> None:
            raise OSError("no space left")

        harness.recorder.record_chunk = broken  # type: ignore[method-assign]
        reply = await chat(harness)
        assert reply.status_code == 500 and "hi" not in reply.json()["error"]["message"].split()
        assert harness.recorder.ends()[0][1] is Finish.FAILED


async def test_each_call_that_a_dead_journal_fails_is_one_line(
    nano: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SqliteJournal(tmp_path / "journal.sqlite") as journal:
        async with gateway_harness(nano, recorder=JournalRecorder(journal)) as harness:
            assert (await chat(harness)).status_code == 200
            journal.close()
            replies = [await chat(harness) for _ in range(3)]
            assert {reply.status_code for reply in replies} == {500}
            assert "it is closed" in replies[-1].text
            await harness.drain()
            gc.collect()  # a task whose error nobody took is logged when it goes
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 3, errors
    for error in errors:
        assert "failed: journal " in error.message and "it is closed" in error.message and not error.exc_info


@pytest.mark.parametrize("stream", [False, True])
async def test_stopping_cancels_what_outlasts_the_grace(nano: Path, stream: bool) -> None:
    """Its client is told nothing that it would not ask again after."""
    async with gateway_harness(nano, grace=1.0) as harness:
        harness.source.replies = [Reply(HELLO, hold=asyncio.Event())]
        asking = asyncio.create_task(chat(harness, stream=stream))
        await harness.source.started.wait()
        await asyncio.sleep(0.1)
        await harness.gateway.stop()
        await asyncio.wait([asking])
        if asking.exception() is None:
            reply = asking.result()
            assert "[DONE]" not in reply.text if stream else reply.status_code >= 500
        assert harness.recorder.ends()[0][1] is Finish.CANCELLED
    assert [event[0] for event in harness.recorder.events].count("ended") == 1


async def test_the_same_prompt_twice_is_two_samples(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("one", "two")
        texts = [(await chat(harness)).json()["choices"][0]["message"]["content"] for _ in range(2)]
        assert texts == ["one", "two"] and len(harness.source.calls) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_joins_the_call_that_runs(nano: Path, stream: bool) -> None:
    async with gateway_harness(nano) as harness:
        held = asyncio.Event()
        harness.source.replies = [Reply(HELLO, hold=held), Reply([*b"other", EOS])]
        first = asyncio.create_task(chat(harness, stream=stream))
        await harness.source.started.wait()
        await asyncio.sleep(0.1)
        retry = asyncio.create_task(chat(harness, stream=stream, headers={"x-stainless-retry-count": "1"}))
        await until(lambda: any(call.output.readers for call in harness.gateway.client._running.values()))
        first.cancel()  # the client had given this attempt up
        await asyncio.sleep(0.1)
        held.set()
        text = (await retry).text
        texts = text if not stream else "".join(text.split('"content":"')[i].split('"')[0] for i in range(1, 7))
        assert "hello" in texts
        assert len(harness.source.calls) == 1 and len(harness.recorder.ends()) == 1
        view = harness.gateway.table.get(harness.session["session_id"]).describe()
        assert (view["turns"], view["tokens"]) == (1, 6)


async def test_a_retry_of_what_was_cancelled_is_a_new_call(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.source.replies = [Reply(HELLO, hold=asyncio.Event()), Reply([*b"anew", EOS])]
        first = asyncio.create_task(chat(harness))
        await harness.source.started.wait()
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0.2)
        await harness.drain()
        retry = await chat(harness, headers={"x-stainless-retry-count": "1"})
        assert retry.json()["choices"][0]["message"]["content"] == "anew"
        assert [end[1] for end in harness.recorder.ends()] == [Finish.CANCELLED, Finish.STOP]


async def test_an_idempotency_key_gives_the_same_reply_again(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies("one", "two")
        key = {"idempotency-key": "k"}
        texts = [(await chat(harness, headers=key)).json()["choices"][0]["message"]["content"] for _ in range(3)]
        assert texts == ["one"] * 3 and len(harness.source.calls) == 1
        other = await harness.http.post(
            harness.session["base_url"] + "/chat/completions", json={**CHAT, "seed": 1}, headers=key
        )
        assert other.status_code == 422
        assert (await chat(harness)).json()["choices"][0]["message"]["content"] == "two"
