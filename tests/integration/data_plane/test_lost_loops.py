"""What agent loops left whose process died: taken up, gone on with, or dropped, and each token is counted once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from support.local_plane import LocalDataPlane, MemoryStore
from support.plane import Caller
from support.plane import plane as stub_plane
from support.runner_plane import RunnerApi, finish, order, runner_plane, submitted
from support.sessions import complete_chat

from seamless_verl.data_plane.finished_sessions import AgentResult, HandedNote
from seamless_verl.data_plane.lease_book import WITHDRAWN
from seamless_verl.journal import GroupDecided, GroupOutcome, JournalReader
from seamless_verl.trajectory.account import DropReason

pytestmark = pytest.mark.integration
FINISHED = AgentResult("finished", 0.5)


async def opened(plane: LocalDataPlane, uid: str, sample: str) -> str:
    session = await plane.open_session({"uid": uid, "metadata": {"session": sample}})
    await complete_chat(session)
    return str(session["session_id"])


def outcomes(journal: Path) -> dict[str, str]:
    return {row.session_id: row.outcome for row in JournalReader(journal).sessions()}


async def test_sessions_that_had_ended_are_taken_up_and_others_dropped(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120), runner_plane(nano, journal) as plane:
        await plane.begin_run("run", 0)
        running, ended, failed = [await opened(plane, "u", sample) for sample in "012"]
        expected = await plane.close_session(ended, "finished", FINISHED)
        await plane.close_session(failed, "failed")  # its loop died before it could say so
        stored, late = await opened(plane, "put", "0"), await opened(plane, "put", "1")
        other = await opened(plane, "other", "0")
        for name in (stored, late):
            await plane.close_session(name, "finished", FINISHED)
        await plane.acknowledge(stored, True, HandedNote("put"))
        assert await plane.handed_over(["u", "put", "other"]) == ["put"]
        for _ in range(2):  # the second time it changes nothing
            await plane.loops_lost(["u", "put"], ["put"], {})
        found = outcomes(journal)
        assert [found[name] for name in (running, failed)] == ["dropped"] * 2
        assert [found[name] for name in (stored, late)] == ["queued"] * 2
        assert await plane.prompts_to_take_up() == {"u"}
        assert await plane.take_up_session("u", "0", 1) is None is await plane.take_up_session("u", "2", 1)
        taken = await plane.take_up_session("u", "1", 1)
        assert taken is not None and (taken.session_id, taken.result) == (ended, FINISHED)
        assert taken.session.account == expected.account
        await plane.acknowledge(ended, True, HandedNote("u"))
        await finish_own(plane, other)
        assert plane.sessions is not None
        account, one = plane.sessions.accounts.total, int(expected.account["tokens/generated"])
        assert account.generated == 6 * one and account.trained == 4 * one
        assert account.dropped == {DropReason.SESSION: 2 * one}


async def finish_own(plane: LocalDataPlane, session_id: str) -> None:
    await plane.close_session(session_id, "finished", FINISHED)
    await plane.acknowledge(session_id, True)


async def test_a_runner_goes_on_and_the_next_loop_gets_its_result(nano: Path, tmp_path: Path) -> None:
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        await plane.begin_run("run", 0)
        api = RunnerApi(plane)
        (dead,) = await submitted(plane, order(0))
        lease = await api.lease()
        (queued,) = await submitted(plane, order(1))
        await api.call(lease)
        await plane.loops_lost(["u0", "u1"], [], {})
        assert (await queued).state is WITHDRAWN, "nobody had taken it"
        (again,) = await submitted(plane, replace(order(0), task_id="another task of the same place"))
        assert (await api.complete(lease, reward=1.0)).status_code == 200
        result = await again
        assert result.session_id == lease["session_id"] and (await dead).session_id == result.session_id
        session = await finish(plane, result)
        assert session.turns == 1
        assert not list(plane.runner_tasks.leases)


async def test_the_task_of_a_session_that_had_ended_is_taken_up_with_it(nano: Path, tmp_path: Path) -> None:
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        await plane.begin_run("run", 0)
        api = RunnerApi(plane)
        for number, result in enumerate((FINISHED, None)):  # without one it can only be dropped
            (task,) = await submitted(plane, order(number))
            lease = await api.lease()
            await api.call(lease)
            await api.complete(lease, reward=1.0)
            await plane.close_session((await task).session_id, "finished", result)
            await plane.loops_lost([f"u{number}"], [], {})
            taken = await plane.take_up_session(f"u{number}", "0", 1)
            assert (taken is None) is (result is None)
            if taken is not None:
                assert taken.session_id == lease["session_id"] and list(plane.runner_tasks.leases)
                await plane.acknowledge(taken.session_id, True, HandedNote("u0"))
            assert not list(plane.runner_tasks.leases)


async def test_a_session_that_is_closed_at_that_moment_is_taken_up(nano: Path, tmp_path: Path) -> None:
    """Whichever comes first, it is dropped or taken up, and counted once."""
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        await plane.begin_run("run", 0)
        assert plane.sessions is not None
        for turns in range(12):
            before, uid = plane.sessions.accounts.total, f"u{turns}"
            name = await opened(plane, uid, "0")
            closing = asyncio.create_task(plane.close_session(name, "finished", FINISHED))
            for _ in range(turns):
                await asyncio.sleep(0)
            await plane.loops_lost([uid], [], {})
            (closed,) = await asyncio.gather(closing, return_exceptions=True)
            taken = await plane.take_up_session(uid, "0", 1)
            if taken is not None:
                assert not isinstance(closed, BaseException)
                await plane.acknowledge(name, True, HandedNote(uid))
            after = plane.sessions.accounts.total
            assert after.generated - before.generated == 9 and not plane.sessions.accounts.unacknowledged, turns


async def test_what_is_not_wanted_any_more_is_dropped_for_its_reason(nano: Path, tmp_path: Path) -> None:
    """Sessions that run or had ended, and a runner's task; and one that was kept for a loop which never came."""
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120), runner_plane(nano, journal) as plane:
        await plane.begin_run("run", 0)
        assert plane.sessions is not None
        api = RunnerApi(plane)
        running, ended = await opened(plane, "u", "0"), await opened(plane, "u", "1")
        await plane.close_session(ended, "finished", FINISHED)
        (task,) = await submitted(plane, order(0))
        lease = await api.lease()
        await plane.loops_lost(["u", "u0"], [], {"u": DropReason.DEFERRED, "u0": DropReason.SESSION})
        assert (await task).state is WITHDRAWN and (await api.complete(lease)).status_code == 409
        assert plane.sessions.accounts.total.dropped[DropReason.DEFERRED] == 2 * 9
        assert await plane.prompts_to_take_up() == frozenset()
        kept = await opened(plane, "kept", "0")
        await plane.close_session(kept, "finished", FINISHED)
        await plane.loops_lost(["kept"], [], {})
        await plane.record_groups([GroupDecided("kept", GroupOutcome.STALE, 3)])
        assert plane.sessions.accounts.total.generated == 3 * 9 and not plane.sessions.accounts.unacknowledged
        assert await plane.prompts_to_take_up() == frozenset()
        assert {outcomes(journal)[name] for name in (running, ended, kept)} == {"dropped"}


async def test_a_session_that_was_dropped_after_all_is_not_taken_up_again(nano: Path, tmp_path: Path) -> None:
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        await plane.begin_run("run", 0)
        name = await opened(plane, "u", "0")
        await plane.close_session(name, "finished", FINISHED)
        await plane.loops_lost(["u"], [], {})
        assert await plane.take_up_session("u", "0", 1) is not None
        await plane.acknowledge(name, False, HandedNote("u"))
        await plane.loops_lost(["u"], [], {})
        assert await plane.take_up_session("u", "0", 1) is None


async def test_sessions_that_had_ended_are_taken_up_also_after_a_restart_of_the_data_plane(
    nano: Path, tmp_path: Path
) -> None:
    """Of newer weights than the run began with, so that only this start can take them up; and a runner's."""
    journal, store = tmp_path / "journal.sqlite", MemoryStore()
    kept: Any = None
    async with asyncio.timeout(120), runner_plane(nano, journal, store=store, version=1) as plane:
        await plane.begin_run("run", 0)
        ended, put = await opened(plane, "u", "0"), await opened(plane, "put", "0")
        for name in (ended, put):
            await plane.close_session(name, "finished", FINISHED)
        api = RunnerApi(plane)
        (task,) = await submitted(plane, order(0))
        lease = await api.lease()
        await api.call(lease)
        await api.complete(lease, reward=1.0)
        await plane.close_session((await task).session_id, "finished", FINISHED)
        kept = store.get()
    await store.put(kept)  # as if the process had died
    async with asyncio.timeout(120), runner_plane(nano, journal, store=store, version=1) as plane:
        assert await plane.prompts_to_take_up() == frozenset()
        for _ in range(2):
            await plane.loops_lost(["u", "u0", "put"], ["put"], {})
        assert await plane.prompts_to_take_up() == {"u", "u0"} and outcomes(journal)[put] == "queued"
        for uid, session_id in (("u", ended), ("u0", str(lease["session_id"]))):
            taken = await plane.take_up_session(uid, "0", 1)
            assert taken is not None and (taken.session_id, taken.result) == (session_id, FINISHED)
            await plane.acknowledge(session_id, True, HandedNote(uid))


@pytest.mark.parametrize("fate", ["complete", "unwanted", "again"])
async def test_a_session_of_an_earlier_start_that_was_taken_up_is_left_as_any_other(
    nano: Path, tmp_path: Path, fate: str
) -> None:
    """Though it had been handed over then."""
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120), runner_plane(nano, journal) as plane:
        await plane.begin_run("run", 0)
        await finish_own(plane, name := await opened(plane, "u", "0"))
    async with asyncio.timeout(120), runner_plane(nano, journal) as plane:
        await plane.begin_run("run", 0)
        assert plane.sessions is not None and await plane.take_up_session("u", "0", 1) is not None
        complete = ["u"] if fate == "complete" else []
        for _ in range(2):
            await plane.loops_lost(["u"], complete, {"u": DropReason.DEFERRED} if fate == "unwanted" else {})
        account = plane.sessions.accounts.total
        if fate == "again":
            assert await plane.take_up_session("u", "0", 1) is not None
            await plane.acknowledge(name, False, HandedNote("u"))
        else:
            assert (account.trained, account.dropped.get(DropReason.DEFERRED, 0)) == ((9, 0) if complete else (0, 9))
            assert outcomes(journal)[name] == ("queued" if complete else "dropped")
        assert not plane.sessions.accounts.unacknowledged


@pytest.mark.parametrize("gateway", [True, False])
def test_calls_of_verls_loops_end_with_the_prompts_of_a_dead_worker(nano: Path, tmp_path: Path, gateway: bool) -> None:
    with stub_plane(nano / "model", tmp_path, shards=2, replicas=1, delay_s=0.05, enabled=gateway) as running:
        running.commit(1)
        planes = running.client.actors

        def counted(name: str) -> list[float]:
            return [metrics[name] for metrics in ray.get([one.metrics.remote() for one in planes])]

        worker = ray.remote(Caller).options(num_cpus=0).remote()
        ray.get(worker.begin.remote(planes))
        while counted("calls/running") != [2, 2]:
            pass  # bounded by the test's own timeout
        ray.kill(worker)
        ray.get([one.loops_lost.remote(["lost"], [], {}) for one in planes])
        assert counted("calls/running") == counted("calls/cancelled") == [1, 1], "each has one of a prompt that goes on"
        assert ray.get(running.servers[0].running.remote()) == 2
        assert ray.get([one.handed_over.remote(["lost"]) for one in planes]) == [[], []]
        before = counted("calls/tokens")
        while not all(now > then for now, then in zip(counted("calls/tokens"), before, strict=True)):
            pass  # bounded by the test's own timeout
