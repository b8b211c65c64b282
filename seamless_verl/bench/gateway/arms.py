"""The three ways to the same engine."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil

from seamless_verl.bench.gateway.client import Connection, request
from seamless_verl.bench.gateway.litellm import prepare, proxy
from seamless_verl.bench.gateway.pace import Asked, Pace
from seamless_verl.bench.gateway.processes import cores, said, started

CHAT = "/v1/chat/completions"
SESSIONS = 64  # that share the calls of one measurement, as agents do
ADMIN_KEY = "the bench's"
PROCESS = "seamless_verl.bench.gateway"


@dataclass(frozen=True)
class Arm:
    """Where calls go, and the key they show. With `admin_key` each belongs to a session, with its key in the path."""

    name: str
    port: int
    pid: int
    key: str = "none"
    admin_key: str | None = None

    def cpu_s(self) -> float:
        """Seconds of CPU its process and its children have used."""
        process = psutil.Process(self.pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return float(sum(one.user + one.system for one in times))

    @asynccontextmanager
    async def requests(self, asked: Sequence[Asked]) -> AsyncGenerator[list[Asked], None]:
        """What is asked for, as whole requests to be sent in turn, over and over; sessions are closed after it."""
        if self.admin_key is None:
            yield [replace(one, body=request(CHAT, one.body, self.key)) for one in asked]
            return
        opened = [await self._admin("/admin/sessions", {"uid": "bench"}) for _ in range(SESSIONS)]
        paths = [f"/s/{session['key']}{CHAT}" for session in opened]
        yield [replace(one, body=request(path, one.body)) for path, one in zip(paths, cycle(asked), strict=False)]
        for one in opened:
            await self._admin(f"/admin/sessions/{one['session_id']}/close", {})

    async def _admin(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection = await Connection.open("127.0.0.1", self.port)
        try:
            await connection.ask(request(path, json.dumps(body).encode(), self.admin_key or ""))
            told: dict[str, Any] = json.loads(connection.body)
            return told
        finally:
            connection.close()


@dataclass(frozen=True)
class Place:
    """The processes of a run; the first arm is the engine called directly."""

    arms: tuple[Arm, ...]

    async def pace(self, pace: Pace) -> None:
        """From now on the engine goes at this pace."""
        connection = await Connection.open("127.0.0.1", self.arms[0].port)
        await connection.ask(request("/pace", json.dumps([pace.per_delta, pace.delay_s]).encode()))
        connection.close()


@contextmanager
def place(*, litellm: bool) -> Iterator[Place]:
    """Starts everything, pinned; ends it with the block."""
    from seamless_verl.tiny import make_model

    here, there = cores()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-bench-")))
        make_model("nano", 0, folder / "model")
        stub = stack.enter_context(started(_python("stub_process"), pinned=here))
        wire, face = said(stub)
        ours = _python("gateway_process", str(folder / "model"), str(folder / "journal.sqlite"), str(wire))
        gateway = stack.enter_context(started(ours, pinned=there))
        arms = [Arm("direct", face, stub.pid), Arm("gateway", said(gateway)[0], gateway.pid, admin_key=ADMIN_KEY)]
        if litellm:
            key = f"sk-{secrets.token_hex(32)}"
            port, pid = stack.enter_context(proxy(prepare(), folder, face, key=key, pinned=there))
            arms.append(Arm("litellm", port, pid, key))
        yield Place(tuple(arms))


def _python(module: str, *args: str) -> list[str]:
    return [sys.executable, "-m", f"{PROCESS}.{module}", *args]
