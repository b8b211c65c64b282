"""The processes of a run: where each is pinned, how they are started, and that they end with the run.

Invariants:
- The client and the stub engine share the first core; what is measured has the second to itself. Every arm is
  measured from the same places, so that what the client and the engine take from each other is in all of them.
- A child ends when its standard input closes: with the run, however that ends.

The LiteLLM proxy, as its own documentation starts it, in an environment of its own.

`prepare` makes that environment once, under the cache folder; nothing of it enters ours.

The three ways to the same engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import IO, Any

import psutil
import uvloop

from seamless_verl.bench.gateway.load import MODEL, Asked, Connection, Pace, request

STOP_S = 10.0
SERVING = "serving on"


def cores() -> tuple[set[int], set[int]]:
    """(the client's and the engine's, the one of what is measured); both the same on a machine with one core."""
    allowed = sorted(os.sched_getaffinity(0))
    return {allowed[0]}, {allowed[1] if len(allowed) > 1 else allowed[0]}


def run(work: Coroutine[Any, Any, None]) -> None:
    """A process of ours: on the loop that Ray's actors have, too."""
    uvloop.run(work)


async def child() -> None:
    """Returns when whoever started this process closes its standard input, or is gone."""
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Reader(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            closed.set()

    await loop.connect_read_pipe(Reader, sys.stdin)
    await closed.wait()


@contextmanager
def started(
    command: Sequence[str], *, pinned: set[int], env: Mapping[str, str] | None = None, log: IO[str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A child on these cores, ended when the block is left. Somebody else's writes to `log`, and is just killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log or subprocess.PIPE,
        stderr=log and subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
        preexec_fn=_pinning(pinned),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


def say(*ports: int) -> None:
    """A child tells where it serves."""
    sys.stdout.write(f"{SERVING} {' '.join(map(str, ports))}\n")
    sys.stdout.flush()


def said(process: subprocess.Popen[str]) -> list[int]:
    """The ports of a child that serves; raises RuntimeError when it ended before."""
    assert process.stdout is not None
    for line in process.stdout:  # libraries may write there, too
        if line.startswith(SERVING):
            return [int(port) for port in line.removeprefix(SERVING).split()]
    raise RuntimeError(f"{process.args!r} ended before it served; what it wrote is above")


def _pinning(to: set[int]) -> Callable[[], None]:
    return lambda: os.sched_setaffinity(0, to)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(STOP_S if process.stdout else 0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


VERSION = "1.106.0"
START_S, LOOK_S = 120.0, 0.2
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR"}


def cache() -> Path:
    """Where what a run needs is kept: SEAMLESS_CACHE, or the user's cache folder."""
    base = os.environ.get("SEAMLESS_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(base) / "seamless_verl"


def prepare() -> Path:
    """Makes the environment if it is not there; returns the proxy's command.

    Raises:
        subprocess.CalledProcessError: pip could not install it; what it said is on stderr.
    """
    folder = cache() / f"litellm-{VERSION}"
    command, complete = folder / "bin" / "litellm", folder / ".complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"litellm[proxy]=={VERSION}"]
        subprocess.run(pip, check=True)
        complete.touch()
    return command


@contextmanager
def proxy(command: Path, folder: Path, engine_port: int, *, key: str, pinned: set[int]) -> Iterator[tuple[int, int]]:
    """A proxy of one worker before the engine's OpenAI face, without database or logs; gives its port and pid.

    It checks one key, without which it does not start, as our gateway checks its sessions'.

    Raises:
        RuntimeError: it does not listen.
    """
    params = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{engine_port}/v1", "api_key": "none"}
    config = folder / "litellm.json"  # which is YAML, too
    config.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": params}]}))
    port = _free_port()
    told = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    env = OFFLINE | {"LITELLM_MASTER_KEY": key}
    with (
        (folder / "litellm.log").open("w") as log,
        started([str(command), *told], pinned=pinned, env=env, log=log) as process,
    ):
        until = time.monotonic() + START_S
        while not _listens(port):  # which is all that it lets anybody know
            if _ended(process, LOOK_S) or time.monotonic() > until:
                raise RuntimeError(f"the LiteLLM proxy does not listen: {Path(log.name).read_text()[-2000:]}")
        yield port, process.pid


def _ended(process: subprocess.Popen[str], within_s: float) -> bool:
    """Whether it has ended, or does so within that time."""
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


CHAT = "/v1/chat/completions"
SESSIONS = 64  # that share the calls of one measurement, as agents do
ADMIN_KEY = "the bench's"
PROCESS = "seamless_verl.bench.gateway"


@dataclass(frozen=True)
class GatewayArm:
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
class EnginePlace:
    """The processes of a run; the first arm is the engine called directly."""

    arms: tuple[GatewayArm, ...]

    async def pace(self, pace: Pace) -> None:
        """From now on the engine goes at this pace."""
        connection = await Connection.open("127.0.0.1", self.arms[0].port)
        await connection.ask(request("/pace", json.dumps([pace.per_delta, pace.delay_s]).encode()))
        connection.close()


@contextmanager
def place(*, litellm: bool) -> Iterator[EnginePlace]:
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
        arms = [
            GatewayArm("direct", face, stub.pid),
            GatewayArm("gateway", said(gateway)[0], gateway.pid, admin_key=ADMIN_KEY),
        ]
        if litellm:
            key = f"sk-{secrets.token_hex(32)}"
            port, pid = stack.enter_context(proxy(prepare(), folder, face, key=key, pinned=there))
            arms.append(GatewayArm("litellm", port, pid, key))
        yield EnginePlace(tuple(arms))


def _python(module: str, *args: str) -> list[str]:
    return [sys.executable, "-m", f"{PROCESS}.{module}", *args]
