"""Runners' requests: leases, results, ends and mistakes, each with a clear answer and a row in the journal."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import Capture, output_lines
from support.local_plane import MemoryStore
from support.rollout import until
from support.runner_plane import LEASE_S, RunnerApi, finish, let_leases_expire, order, runner_plane, submitted

from seamless_verl.client import AsyncClient
from seamless_verl.data_plane import lifecycle
from seamless_verl.data_plane.finished_sessions import HandedNote
from seamless_verl.data_plane.lease_book import TaskOrder
from seamless_verl.errors import OutsideApiError
from seamless_verl.journal import GroupDecided, GroupOutcome, JournalReader, Stage
from seamless_verl.rollout.paused_time import PausedTime
from seamless_verl.trajectory.account import Account, DropReason

pytestmark = pytest.mark.integration


def rows(journal: Path, kind: str) -> list[Any]:
    return [event for event in JournalReader(journal).outside_events() if event.kind == kind]


async def test_a_task_is_leased_done_and_trained_once(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120), runner_plane(nano, journal) as plane:
        api = RunnerApi(plane)
        assert await api.lease(wait_s=0) is None
        waiting = asyncio.create_task(api.lease())
        (running,) = await submitted(plane, order())
        lease = await waiting
        assert (lease["agent"], lease["attempt"], lease["task"]["number"]) == ("default", 1, 0)
        assert await api.lease(wait_s=0) is None, "it was leased twice"
        await api.call(lease)
        beat = await api.post(f"leases/{lease['lease_id']}/heartbeat")
        assert beat.json()["lease_s"] == LEASE_S and beat.json()["paused_s"] >= 0
        assert (await api.complete(lease, reward=0.5, reward_info={"n": 1})).status_code == 200
        result = await running
        assert result.outcome["reward"] == 0.5 and result.session_id == lease["session_id"]
        assert (await plane.run_task(order())) == result, "a repetition"
        again = await api.complete(lease, reward=0.5)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "lease_ended")
        session = await finish(plane, result)
        assert len(session.sequences) == 1
        assert plane.runner_tasks.leases.metrics()["runner_tasks/done"] == 0, "it is forgotten"
        assert plane.sessions is not None and plane.sessions.accounts.total == Account(8, 8)
    assert [row.subject for row in rows(journal, "done")] == [lease["lease_id"]]
    assert [row.detail["code"] for row in rows(journal, "refused")] == ["lease_ended"]


async def test_a_lost_runner_costs_time_only(nano: Path, tmp_path: Path, capsys: Capture) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120), runner_plane(nano, journal) as plane:
        api = RunnerApi(plane)
        (running,) = await submitted(plane, order())
        lost = await api.lease("dies")
        await api.call(lost)
        let_leases_expire(plane)
        lease = await api.lease("lives")
        assert lease["task_id"] == lost["task_id"] and lease["attempt"] == 2 and lease["key"] != lost["key"]
        late = await api.complete(lost, reward=1.0)
        assert (late.status_code, late.json()["error"]["code"]) == (410, "lease_expired")
        assert "no sign of life" in late.json()["error"]["message"]
        gone = await api.http.post(f"/s/{lost['key']}/v1/chat/completions", json={"model": "policy", "messages": []})
        assert gone.status_code in (401, 410), gone.text
        await api.call(lease)
        assert (await api.complete(lease, reward=0.0)).status_code == 200
        session = await plane.close_session((await running).session_id, "finished")
        assert len(session.sequences) == 1
        await plane.acknowledge((await running).session_id, True, HandedNote("u0"))
        await plane.record_groups([GroupDecided("u0", GroupOutcome.TRAINED, 1, {"version": 0})])
        assert plane.sessions is not None
        assert plane.sessions.accounts.total == Account(16, 8, {DropReason.RUNNER_LOST: 8})
    capsys.readouterr()
    lines = output_lines(capsys, "export", str(journal), "--out", str(tmp_path / "rows.jsonl"))
    assert lines[1] == "account: 16 generated = 8 trained + 8 dropped (8 runner_lost)"
    text = "\n".join(output_lines(capsys, "show", str(journal), lost["session_id"]))
    assert "outcome: dropped (no runner works on it any more)" in text
    assert "8 generated = 0 trained + 8 dropped (8 runner_lost)" in text
    reader = JournalReader(journal)
    reasons = {session.session_id: (session.stage, session.reason) for session in reader.sessions()}
    assert reasons[lost["session_id"]] == (Stage.HANDED, "runner_lost")
    assert reasons[lease["session_id"]] == (Stage.HANDED, "finished")


async def test_a_data_plane_that_is_started_again_keeps_its_leases_and_results(nano: Path, tmp_path: Path) -> None:
    journal, store = tmp_path / "journal.sqlite", MemoryStore()
    kept: Any = None
    async with asyncio.timeout(120), runner_plane(nano, journal, store=store) as plane:
        api = RunnerApi(plane)
        first, *left = await submitted(plane, order(1), order(2), order(3))
        done, held, _ = [await api.lease() for _ in range(3)]
        for lease in (done, held):
            await api.call(lease)
        assert (await api.complete(done, reward=0.25)).status_code == 200
        assert (await first).outcome["reward"] == 0.25
        kept = store.get()
        # From here on as if the process died: nobody gets a result any more.
    await store.put(kept)
    async with asyncio.timeout(120), runner_plane(nano, journal, store=store) as plane:
        api = RunnerApi(plane)
        assert (await plane.run_task(order(1))).outcome["reward"] == 0.25
        (again,) = await submitted(plane, order(2))
        await asyncio.sleep(0)
        assert await api.lease(wait_s=0) is None, "it is leased already"
        beat = await api.post(f"leases/{held['lease_id']}/heartbeat")
        assert beat.status_code == 200, beat.text
        assert (await api.complete(held, reward=0.75)).status_code == 200
        result = await again
        assert (result.session_id, result.outcome["reward"]) == (held["session_id"], 0.75)
        await finish(plane, result)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def test_a_session_lives_longer_by_what_its_calls_waited_before_a_restart(
    nano: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "PAUSED_SAVE_S", 0.05)
    journal, store, paused = tmp_path / "journal.sqlite", MemoryStore(), MemoryStore()
    async with asyncio.timeout(120), runner_plane(nano, journal, store=store, paused=paused) as plane:
        opened = await plane.open_session({"uid": "u", "limits": {"lifetime": 1.0}})
        now = [0.0]
        plane.calls.paused_time = PausedTime(lambda: now[0])
        assert plane.sessions is not None
        plane.sessions.gateway.table.paused_s = plane.calls.paused_time.total
        plane.calls.paused_time.begin(opened["session_id"]).set(True)
        now[0] = 600.0
        await until(lambda: paused.get() == {opened["session_id"]: 600.0})
        kept = store.get(), paused.get()
    # From here on as if the process died.
    await store.put(kept[0])
    await paused.put(kept[1])
    async with asyncio.timeout(120), runner_plane(nano, journal, store=store, paused=paused) as plane:
        assert plane.sessions is not None
        await asyncio.sleep(1.1)  # its lifetime
        assert plane.sessions.gateway.table.get(opened["session_id"]).state == "open"
        assert await plane.paused_seconds(opened["session_id"]) == 0.0, "its agent loop carries its own figure over"
    assert paused.get() is None and store.get() is None, "they end with the run"


async def test_what_a_runner_may_not_do_is_answered_and_recorded(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120), runner_plane(nano, journal) as plane:
        api = RunnerApi(plane)
        (running,) = await submitted(plane, order())
        expected: list[str] = []

        async def refused(code: str, status: int, path: str, body: Any = None, *, words: str = "") -> None:
            reply = (
                await api.http.post(path, content=body)
                if isinstance(body, bytes)
                else await api.http.post(path, json=body)
            )
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code), reply.text
            assert words in reply.json()["error"]["message"]
            expected.append(code)

        ask = {"protocol": 3, "runner": "r", "agents": ["default"]}
        await refused("protocol_version", 400, "/runner/lease", ask, words="version 3, this run 2")
        await refused("malformed_request", 400, "/runner/lease", ask | {"agents": []}, words="$.agents")
        await refused("malformed_request", 400, "/runner/lease", {"protocol": 2}, words="runner")
        await refused("not_found", 404, "/runner/nothing", {})
        await refused("lease_unknown", 404, "/runner/leases/none/heartbeat", {})
        lease = await api.lease()
        complete = f"/runner/leases/{lease['lease_id']}/complete"
        await refused(
            "malformed_request", 400, complete, {"status": "finished", "reward": "much"}, words="reward: 'much'"
        )
        await refused("malformed_request", 400, complete, b'{"status": "finished", "reward": NaN}', words="NaN")
        await refused("malformed_request", 400, complete, {"status": "odd"}, words="$.status")
        reward = f"/s/{lease['key']}/v1/session/reward"
        assert (await api.http.post(reward, json={"reward": 1.0})).status_code == 200
        assert (await api.http.post(reward, json={"reward": 1.0})).status_code == 200, "the same again"
        await refused("reward_exists", 409, reward, {"reward": 0.0}, words="has the reward reward=1.0")
        await refused("malformed_request", 400, reward, b'{"reward": NaN}')
        await refused("malformed_request", 400, reward, {"reward": "1.0"})
        await api.call(lease)
        assert (await api.complete(lease)).status_code == 200
        result = await running
        session = await plane.close_session(result.session_id, "finished")
        assert session.rewards == {"reward": 1.0}
        await refused("session_closed", 410, reward, {"reward": 0.0, "name": "late"})
        await plane.acknowledge(result.session_id)
        stranger = RunnerApi(plane, key="a guess")
        assert (await stranger.post("lease", ask)).status_code == 401
        admin = await api.http.post("/admin/sessions", json={"uid": "u"})
        assert admin.status_code == 401, "a runner's key opens no sessions"
    assert [row.detail["code"] for row in rows(journal, "refused")] == expected


async def test_a_task_that_nobody_can_do_fails_with_its_reason(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120), runner_plane(nano, journal) as plane:
        api = RunnerApi(plane)
        (nobody,) = await submitted(plane, order(1, agent="rare", claim_s=0.3))
        assert await api.lease(wait_s=0) is None
        result = await nobody
        assert (
            result.state == "unclaimed" and "no runner that offers the agent 'rare' took it for 0.3 s" in result.error
        )
        (unwilling,) = await submitted(plane, order(2, max_attempts=2))
        for _ in range(2):
            lease = await api.lease()
            reply = await api.post(f"leases/{lease['lease_id']}/return", {"reason": "no docker", "refused": True})
            assert reply.status_code == 200
        result = await unwilling
        assert result.state == "lost" and "no docker" in result.error and result.attempts == 2
        (stopped,) = await submitted(plane, order(3, max_attempts=1))
        lease = await api.lease()
        await api.post(f"leases/{lease['lease_id']}/return", {"reason": "the runner was stopped"})
        lease = await api.lease()
        assert lease["attempt"] == 1, "a runner that was stopped costs no attempt"
        stopped.cancel()
        await asyncio.wait({stopped})
        gone = await api.complete(lease, reward=1.0)
        assert gone.json()["error"]["code"] == "lease_ended" and "no longer wants" in gone.json()["error"]["message"]
        assert not list(plane.runner_tasks.leases)
        assert plane.sessions is not None and not plane.sessions.closed
    assert len(rows(journal, "unclaimed")) == 1 and len(rows(journal, "task refused")) == 2


async def test_sessions_that_are_opened_from_outside_run_beside_leases(nano: Path, tmp_path: Path) -> None:
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        api = RunnerApi(plane)
        (running,) = await submitted(plane, order(1))
        lease = await api.lease()
        async with AsyncClient(str(api.http.base_url), "the admin's") as client:
            opened = await client.open("u", limits={"max_turns": 3}, metadata={"a": 1})
            await api.call(lease)
            await api.complete(lease, reward=1.0)
            await finish(plane, await running)
            await client.reward(opened.session_id, 0.5)
            with pytest.raises(OutsideApiError, match="409 reward_exists"):
                await client.reward(opened.session_id, 0.25)
            assert (await client.look(opened.session_id)).metadata == {"a": 1}
            closed = await client.close_session(opened.session_id)
            assert (closed.state, closed.reason) == ("closed", "finished")


async def test_a_runner_that_leaves_while_it_waits_takes_no_task(nano: Path, tmp_path: Path) -> None:
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        leaving, staying = RunnerApi(plane), RunnerApi(plane)
        waiters = plane.runner_tasks._polls
        waiting = asyncio.create_task(leaving.lease("leaves"))
        before = len(waiters)
        await until(lambda: len(waiters) == before + 1)
        waiting.cancel()
        await until(lambda: len(waiters) == before)
        (running,) = await submitted(plane, order())
        lease = await staying.lease("stays")
        assert lease["attempt"] == 1
        await staying.call(lease)
        await staying.complete(lease, reward=1.0)
        await finish(plane, await running)


def renamed(task: TaskOrder) -> TaskOrder:
    """The order of a later start of the run for the same place of the same group."""
    return replace(task, task_id=f"{task.task_id}-again")


async def test_runners_go_on_after_a_stop_of_the_whole_run(nano: Path, tmp_path: Path) -> None:
    """With the key, the lease and the session that they have; what they completed is not done again."""
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with runner_plane(nano, journal) as plane:
            await plane.begin_run("a run", 0)
            api = RunnerApi(plane)
            await submitted(plane, order(1), order(2), order(3))
            done, held, old = [await api.lease() for _ in range(3)]
            for lease in (done, held, old):
                await api.call(lease)
            assert (await api.complete(done, reward=0.25)).status_code == 200
        for _ in range(2):  # the second start is stopped before it can do anything
            async with runner_plane(nano, journal) as plane:
                api = RunnerApi(plane)
                assert (await api.post(f"leases/{held['lease_id']}/heartbeat")).status_code == 200
        async with runner_plane(nano, journal) as plane:
            api = RunnerApi(plane)
            await plane.begin_run("a run", 1)
            step = {
                "uid": "u3",
                "metadata": {"session": "0", "step": 2},
            }  # a prompt of step 2 has no token of version 0
            orders = [order(1), order(2), replace(order(3), opening=step)]
            first, second, _ = await submitted(plane, *map(renamed, orders))
            assert ((await first).outcome["reward"], (await first).session_id) == (0.25, done["session_id"])
            await api.call(held)
            assert (await api.complete(held, reward=1.0)).status_code == 200
            assert (await second).session_id == held["session_id"]
            session = await finish(plane, await second)
            assert session.turns == 2
            assert (await api.complete(old)).status_code == 409
            fresh = await api.lease()
            assert fresh["task_id"] == "task-3-again" and fresh["session_id"] != old["session_id"]
            metrics = await plane.metrics()
            assert (metrics["resumed/leases"], metrics["resumed/begun_again/older_weights"]) == (2, 1)


async def test_leases_of_another_run_end(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "journal.sqlite"
    async with asyncio.timeout(120):
        async with runner_plane(nano, journal) as plane:
            await plane.begin_run("a run", 0)
            api = RunnerApi(plane)
            await submitted(plane, order())
            lease = await api.lease()
            await api.call(lease)
        async with runner_plane(nano, journal) as plane:
            api = RunnerApi(plane)
            await plane.begin_run("another run", 0)
            assert (await api.post(f"leases/{lease['lease_id']}/heartbeat")).status_code == 409
            await submitted(plane, renamed(order()))
            assert (await api.lease())["session_id"] != lease["session_id"]
    assert JournalReader(journal).stage(lease["session_id"]) is Stage.HANDED
