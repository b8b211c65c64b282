"""Agents that were lost and begin again: their calls are answered from the journal, as far as they are the same."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.local_plane import LocalDataPlane
from support.runner_plane import RunnerApi, finish, let_leases_expire, order, runner_plane, submitted
from support.sessions import sessions

from seamless_verl.data_plane.sessions import Sessions
from seamless_verl.journal import JournalReader, StoredSession
from seamless_verl.trajectory.account import DropReason

pytestmark = pytest.mark.integration
RUN, TOKENS = "run-a", 9


async def begun(started: Sessions, version: int, run: str = RUN) -> Sessions:
    await started.earlier.begin(run, version)
    return started


async def opened(started: Sessions, sample: str = "0", step: int = 2, **metadata: Any) -> dict[str, Any]:
    return await started.open({"uid": "u", "metadata": {"session": sample, "step": step, **metadata}})


async def chat(session: dict[str, Any], *said: str, **options: Any) -> str:
    """A call of a conversation; returns the reply."""
    messages = [{"role": "user" if number % 2 == 0 else "assistant", "content": one} for number, one in enumerate(said)]
    body = {"model": "policy", "messages": messages, "max_tokens": TOKENS, **options}
    async with httpx.AsyncClient(timeout=30) as http:
        reply = await http.post(f"{session['base_url']}/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["message"]["content"])


async def conversation(session: dict[str, Any], turns: int) -> list[str]:
    said: list[str] = []
    for turn in range(turns):
        said.append(f"turn {turn}")
        said.append(await chat(session, *said))
    return said


def read(journal: Path, session: dict[str, Any]) -> StoredSession:
    stored = JournalReader(journal).read(session["session_id"])
    assert stored is not None
    return stored


def generated(stored: StoredSession) -> list[tuple[list[int], list[float], int]]:
    return [
        (list(segment.ids), list(segment.logprobs), segment.version)
        for call in stored.calls
        for segment in call.segments
    ]


async def test_an_agent_of_a_run_that_was_killed_gets_its_replies_again(nano: Path, tmp_path: Path) -> None:
    """And what it asks beyond them, or otherwise, is generated, of the version that serves now."""
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False, version=1) as first:
            await begun(first, 1)
            lost = await opened(first)
            said = await conversation(lost, 2)
        async with sessions(nano, journal, restarted=False, version=2) as second:
            await begun(second, 2)
            again = await opened(second)
            assert again["session_id"] != lost["session_id"]
            assert await conversation(again, 3) == [*said, "turn 2", await chat(again, *said, "turn 2")]
            assert await chat(again, "turn 0") != "", "each is given once"
            await chat(again, "turn 0", max_tokens=4)
            metrics = await second.checked_metrics()
            assert (metrics["sessions/repeated_calls"], metrics["sessions/repeated_tokens"]) == (2, 2 * TOKENS)
            assert metrics["resumed/begun_again/running"] == 1
            assert second.calls.metrics()["calls/begun"] == 4
            result = await second.close(again["session_id"], "finished", 2)
            assert result.turns == 6 and result.account["tokens/generated"] == 5 * TOKENS + 4
    new, old = read(journal, again), read(journal, lost)
    assert [version for *_, version in generated(new)] == [1, 1, 2, 2, 2, 2]
    assert generated(new)[:2] == generated(old)
    assert new.settings["metadata"]["again"] == {"of": lost["session_id"], "times": 1, "newest": 2}


async def test_a_call_that_was_running_goes_on(nano: Path, tmp_path: Path) -> None:
    journal, killed = tmp_path / "journal.sqlite", tmp_path / "killed.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False, version=1, delay_s=0.01) as first:
            await begun(first, 1)
            lost = await opened(first)
            running = asyncio.create_task(chat(lost, "hi", max_tokens=64))
            while not generated(read(journal, lost)):  # noqa: ASYNC110 - nothing notifies of a row
                await asyncio.sleep(0.01)
            with closing(sqlite3.connect(journal)) as source, closing(sqlite3.connect(killed)) as copy:
                source.backup(copy)  # the journal as a kill at this moment would leave it
            whole = await running
        recorded = sum(len(ids) for ids, *_ in generated(read(killed, lost)))
        async with sessions(nano, killed, restarted=False, version=2) as second:
            await begun(second, 2)
            again = await opened(second)
            assert await chat(again, "hi", max_tokens=64) == whole
            assert (await second.checked_metrics())["sessions/repeated_tokens"] == recorded < 64
    found = [(len(ids), version) for ids, _, version in generated(read(killed, again))]
    assert found == [(recorded, 1), (64 - recorded, 2)]


async def test_only_within_the_bound_and_of_weights_that_are_still_there(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False, version=3) as first:
            await begun(first, 1)
            await conversation(await opened(first), 1)
        async with sessions(nano, journal, restarted=False, version=2) as second:
            await begun(second, 2)
            await conversation(await opened(second), 1)  # of version 3, which is gone
            await conversation(await opened(second, "1"), 1)
            await conversation(await opened(second, "3", validation=True), 1)
            assert (await second.checked_metrics())["sessions/repeated_calls"] == 0
        async with sessions(nano, journal, restarted=False, version=9) as third:
            await begun(third, 9)
            await conversation(await opened(third, "0", 4), 1)  # of version 2, too old for step 4
            await conversation(await opened(third, "3", validation=True), 1)
            assert (await third.checked_metrics())["sessions/repeated_calls"] == 0
            await conversation(await opened(third, "1", 3), 1)
            assert (await third.checked_metrics())["sessions/repeated_calls"] == 1


async def test_a_third_time_it_is_sampled_anew(nano: Path, tmp_path: Path) -> None:
    """What an agent dies of would else be repeated for ever."""
    journal = tmp_path / "journal.sqlite"
    repeated = []
    async with asyncio.timeout(120):
        for _ in range(5):
            async with sessions(nano, journal, restarted=False, version=1) as started:
                await begun(started, 1)
                await conversation(await opened(started), 1)
                repeated.append((await started.checked_metrics())["sessions/repeated_calls"])
    assert repeated == [0, 1, 1, 0, 1]


async def test_what_a_second_loss_leaves_is_given_too(nano: Path, tmp_path: Path) -> None:
    """The agent of the second session was lost before it had repeated all of the first one's calls."""
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        for turns, repeated in ((3, 0), (1, 1), (4, 3)):
            async with sessions(nano, journal, restarted=False, version=1) as started:
                await begun(started, 1)
                await conversation(await opened(started), turns)
                assert (await started.checked_metrics())["sessions/repeated_calls"] == repeated


async def test_choices_of_one_request_keep_their_order(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with sessions(nano, journal, restarted=False, version=1) as first:
            await begun(first, 1)
            lost = await opened(first)
            await chat(lost, "hi", n=3)
        async with sessions(nano, journal, restarted=False, version=1) as second:
            await begun(second, 1)
            again = await opened(second)
            await chat(again, "hi", n=3)
            assert (await second.checked_metrics())["sessions/repeated_calls"] == 3
    asked = [
        {call.call_id.rpartition(".")[2]: call.request["gateway"]["asked"] for call in read(journal, one).calls}
        for one in (lost, again)
    ]
    assert asked[0] == asked[1] and len(set(asked[0].values())) == 3


async def test_after_the_death_of_an_agent_loop_worker(nano: Path, tmp_path: Path) -> None:
    """Not where its group is given up, nor in a validation."""

    async def begin(plane: LocalDataPlane, uid: str) -> dict[str, Any]:
        metadata = {"session": "0", "step": 1, "validation": uid == "validated"}
        return await plane.open_session({"uid": uid, "metadata": metadata})

    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        await plane.begin_run("run", 0)
        said = await conversation(await begin(plane, "lost"), 2)
        for uid in ("unwanted", "validated"):
            await conversation(await begin(plane, uid), 1)
        await plane.loops_lost(["lost", "unwanted", "validated"], [], {"unwanted": DropReason.DEFERRED})
        assert await conversation(await begin(plane, "lost"), 2) == said
        for uid in ("unwanted", "validated"):
            await conversation(await begin(plane, uid), 1)
        metrics = await plane.metrics()
        assert metrics["sessions/repeated_calls"] == 2 and metrics["calls/begun"] == 6
        await plane.loops_lost(["lost"], [], {})
        await conversation(await begin(plane, "lost"), 2)
        assert (await plane.metrics())["sessions/repeated_calls"] == 2, "they may be what its worker dies of"


async def test_a_task_of_a_lost_runner_goes_to_another_with_its_replies(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to one that asks while the end of the lease is being recorded."""
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        await plane.begin_run("run", 0)
        api = RunnerApi(plane)
        (task,) = await submitted(plane, order())
        lost = await api.lease("lost")
        await api.call(lost)
        record = plane.runner_tasks.record

        async def record_late(*events: Any) -> None:
            await asyncio.sleep(0.5)
            await record(*events)

        monkeypatch.setattr(plane.runner_tasks, "record", record_late)
        let_leases_expire(plane)
        again = await api.lease("another")  # as soon as the lease of the first has expired
        assert again["session_id"] != lost["session_id"]
        await api.call(again)
        assert (await plane.metrics())["sessions/repeated_calls"] == 1
        assert (await api.complete(again, reward=1.0)).status_code == 200
        assert (await finish(plane, await task)).turns == 1


async def test_a_task_that_a_runner_gives_back_begins_anew(nano: Path, tmp_path: Path) -> None:
    """It may be the replies that it could not go on with. One that never began changes nothing."""
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        await plane.begin_run("run", 0)
        api = RunnerApi(plane)
        (task,) = await submitted(plane, replace(order(), time_limit_s=30.0))
        first = await api.lease()
        await api.call(first)
        body = {"reason": "no room", "refused": False}
        assert (await api.post(f"leases/{first['lease_id']}/return", body)).status_code == 200
        second = await api.lease()
        await api.call(second)
        assert (await plane.metrics())["sessions/repeated_calls"] == 0
        await api.complete(second, reward=1.0)
        await finish(plane, await task)


async def test_a_lease_that_expires_before_the_run_begins(nano: Path, tmp_path: Path) -> None:
    """Loading a model takes longer than a lease lives. Of weights that are gone nothing is given."""
    journal, step = tmp_path / "journal.sqlite", {"uid": "u0", "metadata": {"session": "0", "step": 4}}
    opening = replace(order(), opening=step)
    async with asyncio.timeout(120):
        async with runner_plane(nano, journal, version=5) as plane:
            await plane.begin_run("run", 0)
            api = RunnerApi(plane)
            await submitted(plane, opening)
            lost = await api.lease()
            await api.call(lost)
        async with runner_plane(nano, journal, version=3) as plane:
            api = RunnerApi(plane)
            let_leases_expire(plane)
            while read(journal, lost).reason is None:  # noqa: ASYNC110 - nothing notifies of a row
                await asyncio.sleep(0.05)
            await plane.begin_run("run", 3)
            await submitted(plane, replace(opening, task_id="again"))
            again = await api.lease()
            await api.call(again)
            assert (await plane.metrics())["sessions/repeated_calls"] == 0
