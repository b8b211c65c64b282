"""A reward posted with a reply's id is that turn's own, in every API, for a retry too, and after a restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.gateway import GatewayHarness, gateway_harness, user

from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.recovery import restore_sessions
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.journal import SqliteJournal

pytestmark = pytest.mark.integration
CHAT = {"messages": [user("hi")], "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": CHAT,
    "completions": {"prompt": "hi", "max_tokens": 4},
    "responses": {"input": "hi", "max_output_tokens": 4},
    "messages": CHAT,
}


async def post(harness: GatewayHarness, path: str, body: dict[str, Any], **headers: str) -> Any:
    url = f"{harness.session['base_url']}/{path}"
    return await harness.http.post(url, json={"model": "nano", **body}, headers=headers)


@pytest.mark.parametrize("path", BODIES)
async def test_the_turn_is_that_of_the_reply(nano: Path, tmp_path: Path, path: str) -> None:
    with SqliteJournal(tmp_path / "j.sqlite") as journal:
        async with gateway_harness(nano, recorder=(recorder := JournalRecorder(journal))) as harness:
            ids = [(await post(harness, path, BODIES[path])).json()["id"] for _ in range(3)]
            for number, value in ((1, 0.5), (1, 0.5), (2, -1.0)):
                reply = await post(harness, "session/reward", {"reward": value, "call": ids[number]})
                assert reply.status_code == 200 and reply.json()["call"] == ids[number], reply.text
            record = recorder.record(session_id := harness.session["session_id"])
            names = [f"{session_id}.{number}" for number in (1, 2, 3)]
            assert [turn.turn_id for turn in record.turns] == names
            assert record.rewards == {f"reward@{names[1]}": 0.5, f"reward@{names[2]}": -1.0}
            other = await post(harness, "session/reward", {"reward": 1, "call": ids[1]})
            assert other.status_code == 409, "a turn takes one reward of a name"
            speed = {"reward": 1, "call": ids[1], "name": "speed"}
            assert (await post(harness, "session/reward", speed)).status_code == 200
            assert (await post(harness, "session/reward", {"reward": 7})).status_code == 200
            assert record.rewards["reward"] == 7, "the session's own is another"
            later, table = JournalRecorder(journal), SessionTable()
            await restore_sessions(journal, later, table)
            restored = table.get(session_id)
            assert later.record(session_id).rewards == record.rewards
            assert [later.find_turn(restored, name) for name in ids] == names


async def test_a_call_that_is_none_is_refused(nano: Path, tmp_path: Path) -> None:
    with SqliteJournal(tmp_path / "j.sqlite") as journal:
        async with gateway_harness(nano, recorder=(recorder := JournalRecorder(journal))) as harness:
            known = (await post(harness, "chat/completions", CHAT)).json()["id"]
            for call in ("chatcmpl-other", known[:-1], "", 3, "x" * 201):
                reply = await post(harness, "session/reward", {"reward": 1, "call": call})
                assert reply.status_code == 400 and reply.json()["error"]["param"] == "call", call
            assert recorder.record(harness.session["session_id"]).rewards == {}


@pytest.mark.parametrize("path", BODIES)
async def test_the_reply_of_a_retry_has_the_id_of_the_turn_that_it_reads_again(
    nano: Path, tmp_path: Path, path: str
) -> None:
    """Also where something on the way gives each request another name, and after a restart."""
    with SqliteJournal(tmp_path / "j.sqlite") as journal:
        async with gateway_harness(nano, recorder=(recorder := JournalRecorder(journal))) as harness:
            posts = [
                post(harness, path, BODIES[path], **{"idempotency-key": "k", "x-request-id": f"hop{number}"})
                for number in range(2)
            ]
            first, again = [(await one).json()["id"] for one in posts]
            assert first == again
            assert (await post(harness, "session/reward", {"reward": 1, "call": again})).status_code == 200
            record = recorder.record(session_id := harness.session["session_id"])
            assert record.rewards == {f"reward@{session_id}.1": 1.0}
            assert (await post(harness, "session/reward", {"reward": 2, "call": first})).status_code == 409
            place = urlsplit(harness.session["base_url"]).path
        async with gateway_harness(nano, recorder=JournalRecorder(journal), journal=journal) as harness:
            url, headers = f"{harness.gateway.url}{place}/{path}", {"idempotency-key": "k"}
            later = await harness.http.post(url, json={"model": "nano", **BODIES[path]}, headers=headers)
            assert later.json()["id"] == first and not harness.source.calls
