"""A run that is stopped as a whole and resumed takes up the sessions that had ended, each once, within its bounds."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.sessions import comparable, complete_chat, sessions

from seamless_verl.data_plane.finished_sessions import AgentResult, HandedNote
from seamless_verl.data_plane.sessions import Sessions
from seamless_verl.journal import BEGUN, GroupDecided, GroupOutcome, JournalReader, OutsideEvent, Stage
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.session import Closed

pytestmark = pytest.mark.integration
RUN, TOKENS = "run-a", 9
FINISHED = AgentResult("finished", 0.5)


async def begun(started: Sessions, version: int = 0, run: str = RUN) -> Sessions:
    await started.earlier.begin(run, version)
    return started


async def opened(started: Sessions, uid: str, sample: str = "0", **metadata: Any) -> str:
    """A session in which an agent made a call."""
    session = await started.open({"uid": uid, "metadata": {"session": sample, **metadata}})
    await complete_chat(session)
    return str(session["session_id"])


async def ended(started: Sessions, uid: str, sample: str = "0", **metadata: Any) -> str:
    name = await opened(started, uid, sample, **metadata)
    await started.close(name, "finished", 9, FINISHED)
    return name


async def handed(started: Sessions, uid: str, sample: str = "0") -> str:
    name = await ended(started, uid, sample)
    await started.acknowledge(name, True, HandedNote(uid, rewards={"reward": 0.25}))
    return name


def outcomes(journal: Path) -> dict[str, str]:
    return {row.session_id: row.outcome for row in JournalReader(journal).sessions()}


async def test_what_had_ended_is_taken_up_once_also_by_a_third_start(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False) as first:
            await begun(first)
            whole, part = await handed(first, "u"), await ended(first, "u", "1")
            running = await opened(first, "u", "2")
            trained = await handed(first, "trained")
            await first.record_groups([GroupDecided("trained", GroupOutcome.TRAINED, 1)])
            expected = comparable(await first.close(part, "finished", 0))
        for _ in range(2):  # this start is stopped before it acknowledges
            async with sessions(nano, journal, restarted=False, version=1) as later:
                await begun(later, 1)
                assert later.earlier.uids == {"u"}, "what step 1 trained is in the checkpoint"
                taken = [await later.take_up("u", sample, 1, 1) for sample in ("0", "1", "1")]
                assert [one and one.session_id for one in taken] == [whole, part, part]
                assert [one and comparable(one.session) for one in taken] == [expected] * 3
                assert {one and one.result for one in taken} == {FINISHED}
                assert await later.take_up("u", "2", 1, 1) is None and await later.take_up("v", "0", 1, 1) is None
                assert later.accounts.total == Account()
        assert outcomes(journal)[running] == "dropped"
        async with sessions(nano, journal, restarted=False, version=1) as last:
            await begun(last, 1)
            for sample in ("0", "1"):
                taken_up = await last.take_up("u", sample, 1, 1)
                assert taken_up is not None
                await last.acknowledge(taken_up.session_id, True, HandedNote("u"))
            assert last.accounts.total == Account(2 * TOKENS, 2 * TOKENS)
            metrics = await last.checked_metrics()
            assert (metrics["resumed/sessions"], metrics["resumed/tokens"]) == (2, 2 * TOKENS)
            await last.record_groups([GroupDecided("u", GroupOutcome.TRAINED, 2)])
    found = outcomes(journal)
    assert [found[name] for name in (whole, part, trained, running)] == ["step 2", "step 2", "step 1", "dropped"]


async def on_record(started: Sessions) -> set[str]:
    """The sessions that are left when the journal has deleted all that it may."""
    started.retention.gib = 0.0
    started.retention.check()
    if started.retention.task is not None:
        await started.retention.task
    return {session.session_id for session in started.journal.sessions()}


async def test_the_journal_deletes_what_was_taken_up_only_when_it_was_acknowledged(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False) as first:
            await begun(first)
            uids = ("u", "u", "failed", "trained")
            names = [await handed(first, uid, str(sample)) for sample, uid in enumerate(uids)]
            await first.record_groups([GroupDecided("trained", GroupOutcome.TRAINED, 1)])
        taken, waiting, failed, _ = names
        async with sessions(nano, journal, restarted=False, version=1) as later:
            assert await on_record(later) == {*names}, "it is not known yet what is needed"
            await later.journal.append(OutsideEvent(BEGUN, "", {}, 1.0))  # as the data plane's runner tasks do
            await begun(later, 1)
            assert await later.take_up("u", "0", 1, 1) is not None
            assert await on_record(later) == {taken, waiting, failed}
            await later.record_groups([GroupDecided("failed", GroupOutcome.FAILED, 2)])
            await later.acknowledge(taken, True, HandedNote("u"))
            assert outcomes(journal)[taken] == "queued"
            assert await on_record(later) == {waiting}
        async with sessions(nano, journal, restarted=True, version=1) as restarted:
            assert await on_record(restarted) == {waiting}
            assert await restarted.take_up("u", "1", 1, 1) is not None
            await restarted.acknowledge(waiting, False, HandedNote("u", "its group failed"))
            assert outcomes(journal) == {waiting: "dropped"}
            assert await on_record(restarted) == set()


async def test_a_session_that_is_dropped_while_the_run_begins_ends_once(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose lease expires then: it is closed, and not yet handed over, when the run looks for sessions."""
    journal, closed, go = tmp_path / "journal.sqlite", asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False) as first:
            await begun(first)
            lost = await opened(first, "u")
        async with sessions(nano, journal, restarted=True, version=1) as later:
            drop = later._drop

            async def drop_late(*given: Any) -> None:
                closed.set()
                await go.wait()
                await drop(*given)

            monkeypatch.setattr(later, "_drop", drop_late)
            dropped = asyncio.create_task(
                later.drop(lost, Closed.ABANDONED, DropReason.RUNNER_LOST, "its lease is over")
            )
            await closed.wait()
            await begun(later, 1)
            go.set()
            await dropped
            assert not later.earlier.uids and not later.earlier.dropped_here
            assert later.accounts.total == Account(TOKENS, 0, {DropReason.RUNNER_LOST: TOKENS})
    assert outcomes(journal) == {lost: "dropped"}


async def test_a_session_that_is_dropped_from_two_sides_is_dropped_once(nano: Path, tmp_path: Path) -> None:
    why = (Closed.ABANDONED, DropReason.SESSION, "its agent is gone")
    async with asyncio.timeout(120), sessions(nano, tmp_path / "journal.sqlite", restarted=False) as started:
        await begun(started)
        for turns in range(6):
            name, dropped = await opened(started, f"u{turns}"), started.accounts.total.generated
            first = asyncio.create_task(started.drop(name, *why))
            for _ in range(turns):
                await asyncio.sleep(0)
            await started.drop(name, *why)
            await first
            assert started.accounts.total.generated == dropped + TOKENS
        await started.drop(name, *why)


async def test_tokens_of_weights_that_are_gone_are_not_taken_up(nano: Path, tmp_path: Path) -> None:
    """Not by this start, and not by a later one that has reached their number again."""
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False, version=3) as first:
            await begun(first, 2)
            whole, part = await handed(first, "u"), await ended(first, "u", "1")
            await first.record_groups([GroupDecided("u", GroupOutcome.TRAINED, 4)])
        async with sessions(nano, journal, restarted=False, version=2) as second:
            await begun(second, 2)
            assert not second.earlier.uids
            metrics = await second.checked_metrics()
            assert metrics["resumed/begun_again/newer_weights"] == 2
            assert metrics["resumed/begun_again_tokens"] == 2 * TOKENS
        stored = JournalReader(journal).read(whole)
        assert stored is not None and stored.handed["kept"] is False and "newer_weights" in stored.handed["reason"]
        assert outcomes(journal) == {whole: "dropped", part: "dropped"}
        async with sessions(nano, journal, restarted=False, version=5) as third:
            await begun(third, 5)
            assert not third.earlier.uids


async def test_what_an_abandoned_step_decided_is_not_decided_for_a_later_start(nano: Path, tmp_path: Path) -> None:
    """A start dies in the save of step 20, another one reaches 20 without this group, and a third resumes there."""
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False, version=10) as first:
            await begun(first, 10)
            whole, part = await handed(first, "y"), await ended(first, "y", "1")
            before, other = await handed(first, "x"), await handed(first, "z")
            await first.record_groups([GroupDecided("x", GroupOutcome.TRAINED, 10)])
            await first.record_groups([GroupDecided(uid, GroupOutcome.TRAINED, 20) for uid in ("y", "z")])
        async with sessions(nano, journal, restarted=False, version=10) as second:
            await begun(second, 10)
            assert second.earlier.uids == {"y", "z"}
            assert outcomes(journal)[whole] == "queued"
            await second.record_groups([GroupDecided("z", GroupOutcome.TRAINED, 20)])
        async with sessions(nano, journal, restarted=False, version=20) as third:
            await begun(third, 20)
            assert third.earlier.uids == {"y"}
            assert [one and one.session_id for one in [await third.take_up("y", "0", 11, 20)]] == [whole]
            await third.record_groups([GroupDecided("y", GroupOutcome.TRAINED, 21)])
    found = outcomes(journal)
    assert [found[name] for name in (before, whole, other)] == ["step 10", "step 21", "step 20"]
    assert found[part] == "-", "nobody took it up"


async def test_the_staleness_bound_holds(nano: Path, tmp_path: Path) -> None:
    """A prompt of step p has no token that is older than version p - 1."""
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False, version=2) as first:
            await begun(first, 2)
            old, kept = await handed(first, "old"), await handed(first, "kept")
        async with sessions(nano, journal, restarted=False, version=3) as second:
            await begun(second, 3)
            assert await second.take_up("old", "0", 4, 9) is None
            assert (await second.take_up("kept", "0", 3, 3)) is not None
            assert (await second.checked_metrics())["resumed/begun_again/older_weights"] == 1
    assert outcomes(journal) == {old: "dropped", kept: "queued"}


async def test_what_nobody_takes_up_ends_with_its_group(nano: Path, tmp_path: Path) -> None:
    """As where a group has fewer samples after the resume. What was handed over has ended, and is left as it is."""
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False, version=2) as first:
            await begun(first, 2)
            taken, left = await ended(first, "u"), await ended(first, "u", "1")
            deferred, old = await ended(first, "deferred"), await ended(first, "old")
            kept = await handed(first, "u", "2")
        async with sessions(nano, journal, restarted=False, version=2) as second:
            await begun(second, 2)
            assert (await second.take_up("u", "0", 3, 2)) is not None
            decided = [GroupDecided("u", GroupOutcome.TRAINED, 3), GroupDecided("deferred", GroupOutcome.DEFERRED, 3)]
            await second.record_groups(decided)
            stages = {row.session_id: row.stage for row in JournalReader(journal).sessions()}
            open_still = {name for name in (taken, left, deferred, old, kept) if stages[name] is not Stage.HANDED}
            assert open_still == {taken, deferred, old}
            assert await second.take_up("u", "1", 3, 2) is None
            assert (await second.checked_metrics())["resumed/begun_again/unwanted"] == 1
            await second.record_groups([GroupDecided("old", GroupOutcome.TRAINED, 9)])
            stages = {row.session_id: row.stage for row in JournalReader(journal).sessions()}
            assert {name for name in stages if stages[name] is not Stage.HANDED} == {taken, deferred}


async def test_a_restarted_plane_ends_no_session_that_its_run_may_still_acknowledge(nano: Path, tmp_path: Path) -> None:
    """It does not know which sessions are of this start: ended here, their tokens would be trained without a record."""
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False) as first:
            await begun(first, 0)
            waiting = await ended(first, "u")
        async with sessions(nano, journal, restarted=True) as second:
            await second.record_groups([GroupDecided("u", GroupOutcome.TRAINED, 1)])
            assert {row.session_id: row.stage for row in JournalReader(journal).sessions()}[waiting] is not Stage.HANDED


async def test_what_no_resumed_run_may_take_up(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False) as first:
            await begun(first)
            dropped = await ended(first, "dropped")
            await first.acknowledge(dropped, False, HandedNote("dropped", "too few"))
            await ended(first, "validated", validation=True)
            without = await opened(first, "without")
            await first.close(without, "finished", 0)
        async with sessions(nano, journal, restarted=False) as other:
            await begun(other, run="run-b")
            assert not other.earlier.uids
            assert {row.stage for row in JournalReader(journal).sessions()} == {Stage.HANDED}, "kept for ever"
            theirs = await handed(other, "theirs")
        async with sessions(nano, journal, restarted=False, version=1) as resumed:
            await begun(resumed, 1, run="run-b")
            assert resumed.earlier.uids == {"theirs"}
            assert (await resumed.take_up("theirs", "0", 1, 1)) is not None
            await resumed.acknowledge(theirs, False, HandedNote("theirs", "its group was dropped"))
            assert resumed.accounts.total == Account(TOKENS, 0, {DropReason.SESSION: TOKENS})
    assert outcomes(journal)[theirs] == outcomes(journal)[dropped] == "dropped"


async def test_a_restarted_data_plane_knows_what_may_be_taken_up(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False) as first:
            await begun(first)
            whole, part = await handed(first, "u"), await ended(first, "u", "1")
        async with sessions(nano, journal, restarted=False, version=1) as second:
            await begun(second, 1)
        async with sessions(nano, journal, restarted=True, version=1) as again:
            await begun(again, 1)  # as Ray repeats it
            taken = [await again.take_up("u", sample, 1, 1) for sample in ("0", "1")]
            assert [one and one.session_id for one in taken] == [whole, part]
    assert not await asyncio.to_thread(JournalReader(journal).restore)
