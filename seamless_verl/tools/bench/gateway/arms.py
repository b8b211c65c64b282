"""The arms of the gateway bench, three ways to the same engine, and the processes they run in.

`install_litellm` makes an environment for the LiteLLM proxy once, under the cache folder; nothing of it enters ours.
The proxy is started as its own documentation says.

Invariants:
- The client and the stub engine share the first core; the process that is measured has the second to itself. All
  arms use the same cores, so that what client and engine take from each other is in all of them.
- A child ends when its standard input closes: with the run, however that ends.
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
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import IO

import psutil

from seamless_verl.tools.bench.gateway.load import MODEL, BenchConnection, BenchRequest, Pacing, http_request

STOP_S = 10.0
SERVING = "serving on"


def pinned_cores() -> tuple[set[int], set[int]]:
    """(core of client and engine, core of the measured process); the same one on a machine with one core."""
    allowed = sorted(os.sched_getaffinity(0))
    return {allowed[0]}, {allowed[1] if len(allowed) > 1 else allowed[0]}


async def wait_for_parent() -> None:
    """Returns when the parent closes this process's standard input, or has ended."""
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Reader(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            closed.set()

    await loop.connect_read_pipe(Reader, sys.stdin)
    await closed.wait()


@contextmanager
def child_process(
    command: Sequence[str], *, pinned: set[int], env: Mapping[str, str] | None = None, log: IO[str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A child on the cores `pinned`, ended with the block. One with a `log` is not ours, and is killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=log or subprocess.PIPE,
        stderr=log and subprocess.STDOUT,
        text=True,
        env={**os.environ, **(env or {})},
        preexec_fn=lambda: os.sched_setaffinity(0, pinned),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _stop(process)


def announce_ports(*ports: int) -> None:
    """Prints the ports of a child, for `read_ports`."""
    sys.stdout.write(f"{SERVING} {' '.join(map(str, ports))}\n")
    sys.stdout.flush()


def read_ports(process: subprocess.Popen[str]) -> list[int]:
    """Waits until a child serves, and returns its ports; raises RuntimeError when it ended before."""
    assert process.stdout is not None
    for line in process.stdout:  # libraries may write there, too
        if line.startswith(SERVING):
            return [int(port) for port in line.removeprefix(SERVING).split()]
    raise RuntimeError(f"{process.args!r} ended before it served; what it wrote is above")


def _stop(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(STOP_S if process.stdout else 0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


LITELLM_VERSION = "1.106.0"
START_S, POLL_S = 120.0, 0.2
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR"}


def install_litellm() -> Path:
    """Makes the environment in SEAMLESS_CACHE, or the user's cache folder, unless it exists; returns the command.

    Raises:
        subprocess.CalledProcessError: pip could not install it; its output is on stderr.
    """
    base = os.environ.get("SEAMLESS_CACHE") or os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    folder = Path(base) / "seamless_verl" / f"litellm-{LITELLM_VERSION}"
    command, complete = folder / "bin" / "litellm", folder / ".complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"litellm[proxy]=={LITELLM_VERSION}"]
        subprocess.run(pip, check=True)
        complete.touch()
    return command


@contextmanager
def litellm_proxy(
    command: Path, folder: Path, engine_port: int, *, key: str, pinned: set[int]
) -> Iterator[tuple[int, int]]:
    """A proxy of one worker for the engine's OpenAI API, without database or logs; gives its port and pid.

    It checks one key, as our gateway checks its sessions' keys; it does not start without one.

    Raises:
        RuntimeError: it does not listen.
    """
    params = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{engine_port}/v1", "api_key": "none"}
    config = folder / "litellm.json"  # which is YAML, too
    config.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": params}]}))
    port = _free_port()
    options = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    env = OFFLINE | {"LITELLM_MASTER_KEY": key}
    with (
        (folder / "litellm.log").open("w") as log,
        child_process([str(command), *options], pinned=pinned, env=env, log=log) as process,
    ):
        until = time.monotonic() + START_S
        while not _listens(port):  # it gives no other sign that it is ready
            time.sleep(POLL_S)
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the LiteLLM proxy does not listen: {Path(log.name).read_text()[-2000:]}")
        yield port, process.pid


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


CHAT = "/v1/chat/completions"
SESSIONS = 64  # they share the calls of one measurement, as agents do
ADMIN_KEY = "the bench's"
PACKAGE = "seamless_verl.tools.bench.gateway"


@dataclass(frozen=True)
class GatewayArm:
    """Where calls go, and the key they carry. With `admin_key` each call is of a session, whose key is in the path."""

    name: str
    port: int
    pid: int
    key: str = "none"
    admin_key: str | None = None

    def cpu_s(self) -> float:
        """CPU seconds that its process and its children have used."""
        process = psutil.Process(self.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return float(sum(time.user + time.system for time in times))

    @asynccontextmanager
    async def requests(self, requests: Sequence[BenchRequest]) -> AsyncGenerator[list[BenchRequest], None]:
        """The requests as encoded HTTP, to be sent in turn, over and over; sessions are closed with the block."""
        if self.admin_key is None:
            yield [replace(request, body=http_request(CHAT, request.body, self.key)) for request in requests]
            return
        connection = await BenchConnection.open("127.0.0.1", self.port)
        sessions = [await connection.ask("/admin/sessions", {"uid": "bench"}, self.admin_key) for _ in range(SESSIONS)]
        paths = [f"/s/{session['key']}{CHAT}" for session in sessions]
        pairs = zip(paths, cycle(requests), strict=False)
        yield [replace(request, body=http_request(path, request.body)) for path, request in pairs]
        for session in sessions:
            await connection.ask(f"/admin/sessions/{session['session_id']}/close", {}, self.admin_key)
        connection.close()


@dataclass(frozen=True)
class BenchProcesses:
    """The processes of a run; the first arm is the engine called directly."""

    arms: tuple[GatewayArm, ...]

    async def set_pacing(self, pacing: Pacing) -> None:
        """Sets the pacing of the stub engine."""
        connection = await BenchConnection.open("127.0.0.1", self.arms[0].port)
        await connection.ask("/pacing", [pacing.tokens_per_chunk, pacing.delay_s])
        connection.close()


@contextmanager
def start_processes(*, litellm: bool) -> Iterator[BenchProcesses]:
    """Starts all processes, pinned; ends them with the block."""
    from seamless_verl.tiny import make_model

    client_cores, gateway_cores = pinned_cores()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-bench-")))
        make_model("nano", 0, folder / "model")
        stub = stack.enter_context(child_process(module("stub_process", 1, 1, 0.0), pinned=client_cores))
        engine_port, openai_port = read_ports(stub)
        ours = module("gateway_process", folder / "model", folder / "journal.sqlite", engine_port)
        gateway = stack.enter_context(child_process(ours, pinned=gateway_cores))
        arms = [
            GatewayArm("direct", openai_port, stub.pid),
            GatewayArm("gateway", read_ports(gateway)[0], gateway.pid, admin_key=ADMIN_KEY),
        ]
        if litellm:
            key = f"sk-{secrets.token_hex(32)}"
            proxy = litellm_proxy(install_litellm(), folder, openai_port, key=key, pinned=gateway_cores)
            port, pid = stack.enter_context(proxy)
            arms.append(GatewayArm("litellm", port, pid, key))
        yield BenchProcesses(tuple(arms))


def module(name: str, *arguments: object) -> list[str]:
    """The command line of one of the processes."""
    return [sys.executable, "-m", f"{PACKAGE}.{name}", *map(str, arguments)]
