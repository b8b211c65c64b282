"""Sessions over restarts of a data plane: each close returns the same, and each is handed over once."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from pathlib import Path

import httpx
import pytest
from support.sessions import FAILURES, comparable, complete_chat, sessions

from seamless_verl.data_plane.finished_sessions import HandedNote
from seamless_verl.errors import JournalError, JournalOrderError
from seamless_verl.journal import GroupDecided, GroupOutcome, JournalReader, Stage
from seamless_verl.trajectory.account import Account, DropReason

pytestmark = pytest.mark.integration


async def test_a_session_closed_again_is_the_same_also_after_a_restart(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False) as first:
            closed, left = [await first.open({"uid": "u"}) for _ in range(2)]
            for opened in (closed, left):
                await complete_chat(opened)
            name, still_open = closed["session_id"], left["session_id"]
            given = comparable(await first.close(name, "finished", 0))
            assert given[0] and given == comparable(await first.close(name, "finished", 0))
            with pytest.raises(JournalOrderError):
                await first.acknowledge(still_open, kept=True)
        reader = JournalReader(journal)
        assert (reader.stage(name), reader.stage(still_open)) == (Stage.HANDING, Stage.OPEN)
        async with sessions(nano, journal, restarted=True) as second:
            assert given == comparable(await second.close(name, "finished", 0))
            for _ in range(2):
                await second.acknowledge(name, kept=True)
            assert second.accounts.total == Account(9, 9), "it was counted twice"
            assert reader.stage(name) is Stage.HANDED
            with pytest.raises(JournalOrderError):
                await second.close(name, "finished", 0)
            assert comparable(await second.close(still_open, "failed", 0))[2:] == given[2:]
            await second.acknowledge(still_open, kept=False)
            assert second.accounts.total == Account(18, 9, {DropReason.SESSION: 9}), (
                "nothing of a failed session is trained"
            )
            orphan = (await second.open({"uid": "u"}))["session_id"]
            untaken, begun = [(await second.open({"uid": "u"}))["session_id"] for _ in range(2)]
            await second._close(untaken, "finished")
            await second.close(begun, "finished", 0)
        async with sessions(nano, journal, restarted=False) as other_run:
            assert orphan not in other_run.closed
            rows = {row.session_id: row for row in reader.sessions()}
            assert {row.stage for row in rows.values()} == {Stage.HANDED}, "it would be kept for ever"
            assert [rows[name].reason for name in (orphan, untaken, begun)] == ["abandoned", "finished", "finished"]
            assert [rows[name].outcome for name in (orphan, untaken, begun)] == ["dropped", "dropped", "-"]
            await other_run.journal.compact(time.time() + 1)
            assert reader.sessions() == ()


async def test_what_became_of_a_group_is_in_the_account_and_in_the_journal(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120), sessions(nano, journal, restarted=False) as started:
        for uid in ("trained", "stale", "validated"):
            opened = await started.open({"uid": uid, "metadata": {"validation": uid == "validated"}})
            await complete_chat(opened)
            await started.close(opened["session_id"], "finished", 0)
            note = HandedNote(uid, rewards={"reward": 0.5, "odd": float("nan")}, validation=uid == "validated")
            await started.acknowledge(opened["session_id"], kept=True, note=note)
            named = {"key": opened["session_id"], "group": uid, "version": 0}
            assert started.calls._order.enter(array("i", [1]), **named)[0].begins, "its order is not kept"
        assert started.accounts.total == Account(27, 18, {DropReason.VALIDATION: 9})
        await started.record_groups(
            [GroupDecided("trained", GroupOutcome.TRAINED, 3), GroupDecided("stale", GroupOutcome.STALE, 3)]
        )
        assert started.accounts.total == Account(27, 9, {DropReason.VALIDATION: 9, DropReason.GROUP: 9})
        assert not started.accounts.handed_over(["trained", "stale", "validated"])
    found = JournalReader(journal).sessions()
    assert {row.uid: row.outcome for row in found} == {"trained": "step 3", "stale": "stale", "validated": "validation"}
    stored = JournalReader(journal).read(found[0].session_id)
    assert stored is not None and stored.rewards == {"reward": 0.5}
    assert stored.handing["limits"] == {"max_sequence": None}


async def test_a_session_opened_over_http_is_recorded_and_dropped(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(60), sessions(nano, journal, restarted=False) as started:
        admin = json.loads(started.admin_file.read_text())
        headers = {"Authorization": f"Bearer {admin['key']}"}
        async with httpx.AsyncClient(base_url=admin["url"], headers=headers, timeout=30) as http:
            opened = (await http.post("/admin/sessions", json={"uid": "u"})).json()
            await complete_chat(opened)
            closed = await http.post(f"/admin/sessions/{opened['session_id']}/close", json={})
            assert closed.status_code == 200, closed.text
        await asyncio.gather(*started.discards)
        assert started.accounts.total == Account(9, 0, {DropReason.SESSION: 9})
        started.forget_finished()
        assert not started.finishing, "the gateway still knows the session"
    assert JournalReader(journal).stage(opened["session_id"]) is Stage.HANDED


async def test_a_session_opened_over_http_is_dropped_also_when_it_is_closed_after_a_restart(
    nano: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False) as first:
            ours = await first.open({"uid": "ours"})
            opened = await first.gateway.admin.handle("POST", "/admin/sessions", {"uid": "u"})
            await complete_chat(opened)
        async with sessions(nano, journal, restarted=True) as second:
            assert list(second.closed) == [ours["session_id"]]
            await second.gateway.admin.handle("POST", f"/admin/sessions/{opened['session_id']}/close", {})
            await asyncio.gather(*second.discards)
            assert second.accounts.total == Account(9, 0, {DropReason.SESSION: 9})
    assert JournalReader(journal).stage(opened["session_id"]) is Stage.HANDED


async def test_an_expiry_that_cannot_be_recorded_is_reported(nano: Path, tmp_path: Path) -> None:
    FAILURES.clear()

    async def expire() -> None:
        async with sessions(nano, tmp_path / "journal.sqlite", restarted=False) as started:
            await started.open({"uid": "u", "limits": {"lifetime": 0.1}})
            started.journal.close()
            while not FAILURES:  # noqa: ASYNC110 - the case's timeout bounds it
                await asyncio.sleep(0.05)

    await asyncio.wait_for(expire(), 60)
    assert isinstance(FAILURES[0], JournalError)


async def test_a_session_that_nobody_can_have_ends_when_it_is_opened_again_or_with_its_group(
    nano: Path, tmp_path: Path
) -> None:
    """Ray repeats the call that opened it, since the reply was lost with a process."""
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False) as first:
            bodies = [{"uid": "u", "metadata": {"session": str(number)}} for number in range(3)]
            lost, used, other = [(await first.open(body)) for body in bodies]
            await complete_chat(used)
        async with sessions(nano, journal, restarted=True) as second:
            again = [(await second.open(body))["session_id"] for body in bodies[:2]]
            assert set(second.awaited()) == {used["session_id"], other["session_id"], *again}
            await second.record_groups([GroupDecided("u", GroupOutcome.FAILED, 1)])
            assert set(second.awaited()) == {used["session_id"], *again}, "nobody opened the third one again"
    rows = {row.session_id: row for row in JournalReader(journal).sessions()}
    assert (rows[lost["session_id"]].reason, rows[lost["session_id"]].outcome) == ("abandoned", "dropped")
    assert (rows[other["session_id"]].reason, rows[other["session_id"]].outcome) == ("abandoned", "dropped")


async def test_a_session_over_http_that_was_closed_before_a_kill_is_handed_over(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False) as first:
            opened = await first.gateway.admin.open({"uid": "u"})
            await complete_chat(opened)
            first.recorder._on_closed = lambda session_id: None  # as where the process dies then
            await first.gateway.admin.close(opened["session_id"], "finished")
        assert JournalReader(journal).stage(opened["session_id"]) is Stage.CLOSED
        async with sessions(nano, journal, restarted=True) as second:
            assert second.accounts.total == Account(9, 0, {DropReason.SESSION: 9})
        assert JournalReader(journal).stage(opened["session_id"]) is Stage.HANDED
