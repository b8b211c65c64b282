"""A plane's sessions over its deaths: closed as often as asked, given the same each time, handed over once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from seamless_verl.data_plane.sessions import FinishedSession, Sessions, SessionSettings
from seamless_verl.errors import JournalError, JournalOrderError
from seamless_verl.journal import JournalReader, Stage
from seamless_verl.rollout.call import Calls
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.routing import PrefixAffinity
from seamless_verl.testing.stub_engine import StubEngine
from seamless_verl.trajectory.account import Account, DropReason

pytestmark = pytest.mark.integration
BODY: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
FAILURES: list[BaseException] = []


@asynccontextmanager
async def sessions(nano: Path, journal: Path, *, again: bool) -> AsyncGenerator[Sessions, None]:
    """One life; what is not closed in it is left open in the journal, as by a death."""
    fleet = Fleet(policy=PrefixAffinity())
    stub = StubEngine("a", vocabulary=128)
    fleet.add("a", engine=stub, control=stub, capacity=8, version=0)
    options = ("--served-model-name", "policy")
    settings = SessionSettings(str(nano / "model"), str(journal), "admin-key", options=options)
    one = Sessions(settings, Calls(fleet), on_failure=FAILURES.append)
    await one.start(restarted=again)
    try:
        yield one
    finally:
        await one.stop()


async def said(opened: dict[str, Any]) -> None:
    async with httpx.AsyncClient(timeout=30) as http:
        reply = await http.post(f"{opened['base_url']}/chat/completions", json=BODY)
        assert reply.status_code == 200, reply.text


def plain(session: FinishedSession) -> list[Any]:
    parts = [
        (one.prompt_ids.tolist(), one.response_ids.tolist(), one.response_mask.tolist(), one.rollout_log_probs.tolist())
        for one in session.sequences
    ]
    return [parts, session.rewards, session.turns, session.account]


async def test_closed_again_in_this_life_or_the_next_it_is_the_same(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, again=False) as first:
            closed, left = [await first.open({"uid": "u"}) for _ in range(2)]
            for one in (closed, left):
                await said(one)
            name, open_one = closed["session_id"], left["session_id"]
            given = plain(await first.close(name, "finished", 0))
            assert given[0] and given == plain(await first.close(name, "finished", 0))
            with pytest.raises(JournalOrderError):
                await first.acknowledge(open_one, kept=True)
        reader = JournalReader(journal)
        assert (reader.stage(name), reader.stage(open_one)) == (Stage.HANDING, Stage.OPEN)
        async with sessions(nano, journal, again=True) as second:
            assert given == plain(await second.close(name, "finished", 0))
            for _ in range(2):
                await second.acknowledge(name, kept=True)
            assert second.account == Account(9, 9), "it was counted twice"
            assert reader.stage(name) is Stage.HANDED
            with pytest.raises(JournalOrderError):
                await second.close(name, "finished", 0)
            assert plain(await second.close(open_one, "failed", 0))[2:] == given[2:]
            await second.acknowledge(open_one, kept=False)
            assert second.account == Account(18, 9, {DropReason.SESSION: 9}), "nothing of a failed session is trained"
            orphan = (await second.open({"uid": "u"}))["session_id"]
        async with sessions(nano, journal, again=False) as other_run:
            assert orphan not in other_run.closed
            (summary,) = [one for one in reader.sessions() if one.session_id == orphan]
            assert (summary.stage, summary.reason) == (Stage.CLOSED, "abandoned")


async def test_an_expiry_that_cannot_be_recorded_is_heard_of(nano: Path, tmp_path: Path) -> None:
    FAILURES.clear()

    async def whole() -> None:
        async with sessions(nano, tmp_path / "journal.sqlite", again=False) as one:
            await one.open({"uid": "u", "limits": {"lifetime": 0.1}})
            one.journal.close()
            while not FAILURES:  # noqa: ASYNC110 - the case's timeout bounds it
                await asyncio.sleep(0.05)

    await asyncio.wait_for(whole(), 60)
    assert isinstance(FAILURES[0], JournalError)
