"""Sessions and a journal in memory for runners' tasks; each of their steps takes as long as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from seamless_verl.client.messages import WAIT_S
from seamless_verl.data_plane.lease_book import LeaseTerms, TaskOrder
from seamless_verl.data_plane.lease_record import live_leases
from seamless_verl.data_plane.runner_requests import RunnerRequests
from seamless_verl.data_plane.runner_tasks import RunnerTasks
from seamless_verl.gateway.api_errors import ApiError
from seamless_verl.journal import OutsideEvent


@dataclass
class Kept:
    """What outlives a process: the events, and, after each, which sessions were open, with their metadata."""

    events: list[OutsideEvent] = field(default_factory=list)
    open_sessions: list[dict[str, dict[str, Any]]] = field(default_factory=list)


class MemorySessions:
    """`steps` gives the turns of the event loop that each opening, append and drop takes."""

    def __init__(self, steps: Iterator[int], events: tuple[OutsideEvent, ...] = (), **open_sessions: Any) -> None:
        self.kept, self.steps = Kept(list(events)), steps
        self.closed = {name: asyncio.Event() for name in open_sessions}
        self.metadata: dict[str, dict[str, Any]] = dict(open_sessions)
        self.journal = SimpleNamespace(append=self._append)
        table = SimpleNamespace(get=self._session)
        self.gateway = SimpleNamespace(table=table)
        self.earlier = SimpleNamespace(version=-1)
        self.calls = SimpleNamespace(paused_time=SimpleNamespace(seconds=lambda name: 0.0))

    def _append(self, *events: OutsideEvent) -> asyncio.Future[None]:
        for event in events:
            self.kept.events.append(event)
            self.kept.open_sessions.append({name: self.metadata[name] for name in self.closed})
        return asyncio.ensure_future(self._turns())

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        await self._turns()
        name = f"s{len(self.metadata)}"
        self.metadata[name], self.closed[name] = body["metadata"], asyncio.Event()
        return {"session_id": name, "key": f"key of {name}"}

    def _session(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(metadata=self.metadata[name], requests=len(name) % 2)

    def lose(self, session_id: str, newest: int | None = None) -> None:
        assert session_id in self.closed, "it has ended, and its agent does not begin again"

    async def drop(self, session_id: str, *why: Any) -> None:
        await self._turns()
        del self.closed[session_id]  # a second drop raises
        await self._turns()

    async def _turns(self) -> None:
        for _ in range(next(self.steps)):
            await asyncio.sleep(0)


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class RunnersAndLoops:
    """Runner tasks with the requests of their agent loops and runners, each of which runs beside the others."""

    def __init__(self, sessions: MemorySessions, *, own_clock: bool = True) -> None:
        self.sessions, self.clock, self.failures = sessions, Clock(), list[BaseException]()
        now = self.clock if own_clock else None
        self.tasks = RunnerTasks(sessions, now=now, on_failure=self.failures.append)  # type: ignore[arg-type]
        self.tasks.restored = live_leases(tuple(sessions.kept.events))
        self.loops: list[asyncio.Task[Any]] = []
        self.requests: list[asyncio.Task[Any]] = []
        self.leases: list[str] = []
        self.codes: list[str] = []

    def submit(
        self, task_id: str, *, max_attempts: int = 2, claim_s: float | None = None, lease_s: float = 10.0
    ) -> asyncio.Task[Any]:
        terms = LeaseTerms("a", lease_s, claim_s, max_attempts)
        order = TaskOrder(task_id, {}, {"uid": "u", "metadata": {}}, 60.0, terms)
        self.loops.append(asyncio.create_task(self.tasks.run(order)))
        return self.loops[-1]

    def lease(self, lease_id: str = "") -> None:
        body = {"protocol": 2, "runner": "r", "agents": ["a"], "wait_s": WAIT_S}
        self._request("lease", body | ({"lease_id": lease_id} if lease_id else {}))

    def end(self, pick: int, how: str) -> None:
        """A request about one of the leases that runners got."""
        if self.leases:
            body = {"heartbeat": {}, "complete": {"status": "finished"}, "return": {"reason": "why", "refused": True}}
            lease_id = self.leases[pick % len(self.leases)]
            if how == "give back":
                self.give_back(lease_id)
            else:
                self._request(f"leases/{lease_id}/{how}", body[how])

    def give_back(self, lease_id: str) -> None:
        self._request(f"leases/{lease_id}/return", {"reason": "stopped"})

    def _request(self, path: str, body: dict[str, Any]) -> None:
        async def asked() -> None:
            try:
                reply = await RunnerRequests(self.tasks).handle("POST", f"/runner/{path}", body)
            except ApiError as error:
                self.codes.append(str(error.code))
            else:
                if reply.get("lease"):
                    self.leases.append(reply["lease"]["lease_id"])

        self.requests.append(asyncio.create_task(asked()))

    async def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        self.tasks.sooner.set()

    async def settle(self, turns: int = 60) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """Ends all; raises what a request raised other than a refusal."""
        for task in (*self.requests, *self.loops):
            task.cancel()
        ended = await asyncio.gather(*self.requests, *self.loops, return_exceptions=True)
        await self.settle()
        await self.tasks.stop()
        errors = [error for error in ended if isinstance(error, Exception)]
        if errors or self.failures:
            raise ExceptionGroup("of requests and the expiry", [*errors, *self.failures])  # type: ignore[list-item]
