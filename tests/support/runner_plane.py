"""A data plane in this process, with its gateway, over a stub engine, and tasks for runners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from seamless_verl.client import AdminFile
from seamless_verl.data_plane.finished_sessions import FinishedSession
from seamless_verl.data_plane.lease_book import LeaseTerms, TaskOrder, TaskResult
from seamless_verl.data_plane.settings import PlaneSettings, SessionSettings
from seamless_verl.tools.bench.stub_engine import StubEngine
from support.local_plane import LocalDataPlane

OPTIONS = ("--served-model-name", "policy")
RUNNER_KEY = "the runners'"
LEASE_S = 600.0  # no test takes so long: `let_leases_expire` ends them


@asynccontextmanager
async def runner_plane(
    nano: Path,
    journal: Path,
    *,
    store: Any = None,
    paused: Any = None,
    delay_s: float = 0.0,
    version: int = 0,
    **sessions: Any,
) -> AsyncGenerator[LocalDataPlane, None]:
    settings = SessionSettings(
        str(nano / "model"), str(journal), "the admin's", RUNNER_KEY, options=OPTIONS, **sessions
    )
    plane = LocalDataPlane(PlaneSettings("plane", "token", sessions=settings))
    if store is not None:
        plane.store = store
    if paused is not None:
        plane.paused_store = paused
    await plane.ensure_started()
    stub = StubEngine("a", vocabulary=128, delay_s=delay_s, version=version)
    plane.fleet.commit(version)
    plane.fleet.add("a", engine=stub, control=stub, capacity=256, version=version)
    try:
        yield plane
    finally:
        await plane.stop()


def order(number: int = 0, *, agent: str = "default", time_limit_s: float = 60.0, **terms: Any) -> TaskOrder:
    given = {"lease_s": LEASE_S, "claim_s": None, "max_attempts": 8} | terms
    task = {"prompt": [{"role": "user", "content": f"task {number}"}], "number": number, "pause_s": 0.1}
    opening = {"uid": f"u{number}", "limits": {"lifetime": 600}, "metadata": {"session": "0"}}
    return TaskOrder(f"task-{number}", task, opening, time_limit_s, LeaseTerms(agent, **given))


def let_leases_expire(plane: LocalDataPlane) -> None:
    """So much time goes by without a sign of life of any runner."""
    plane.runner_tasks.awake._awake_s += LEASE_S + 1
    plane.runner_tasks.sooner.set()


async def finish(plane: LocalDataPlane, result: TaskResult) -> FinishedSession:
    """What an agent loop does with the result of a task."""
    session = await plane.close_session(result.session_id, "finished")
    await plane.acknowledge(result.session_id, kept=True)
    return session


class RunnerApi:
    """Requests as a runner sends them."""

    def __init__(self, plane: LocalDataPlane, key: str = RUNNER_KEY) -> None:
        assert plane.sessions is not None
        found = AdminFile.read(plane.sessions.admin_file)
        assert found.runner_key == RUNNER_KEY
        headers = {"authorization": f"Bearer {key}"}
        self.http = httpx.AsyncClient(base_url=found.url, headers=headers, timeout=60)

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        return (
            await self.http.post(f"/runner/{path}", content=body)
            if isinstance(body, bytes)
            else await self.http.post(f"/runner/{path}", json=body or {})
        )

    async def lease(self, runner: str = "r", *, agents: tuple[str, ...] = ("default",), wait_s: float = 10.0) -> Any:
        body = {"protocol": 2, "runner": runner, "agents": list(agents), "wait_s": wait_s}
        reply = await self.post("lease", body)
        assert reply.status_code == 200, reply.text
        return reply.json()["lease"]

    async def call(self, lease: Any) -> None:
        """One call of the model in the session of the lease."""
        body = {"model": "policy", "messages": lease["task"]["prompt"], "max_tokens": 8}
        reply = await self.http.post(f"/s/{lease['key']}/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text

    async def complete(self, lease: Any, **body: Any) -> httpx.Response:
        return await self.post(f"leases/{lease['lease_id']}/complete", {"status": "finished", **body})


async def submitted(plane: LocalDataPlane, *orders: TaskOrder) -> list[asyncio.Task[TaskResult]]:
    return [asyncio.create_task(plane.run_task(each)) for each in orders]
