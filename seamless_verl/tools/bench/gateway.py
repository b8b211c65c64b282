"""What the gateway costs: a stub engine called directly, through the gateway, and through the LiteLLM proxy.

All three are measured in one run: in each round one after another, so that other load on the machine meets all of
them. The client and the stub engine share the first core; the process that is measured has the second to itself. So
what client and engine take from each other is in all of them. LiteLLM is installed into an environment of its own,
under the cache folder, and started as its documentation says; it checks one key, as our gateway checks its sessions'.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import psutil
import uvloop

from seamless_verl.cli.output import text_table
from seamless_verl.tools.bench.load import (
    ADMIN_KEY,
    CHAT,
    MODEL,
    PACINGS,
    SESSIONS,
    BenchConnection,
    BenchRequest,
    Pacing,
    ReplyTiming,
    Shape,
    http_request,
    shapes,
)
from seamless_verl.tools.bench.shared import bench_parser, child_process, cpu_s, gateways, pinned_to, split_cores

LITELLM_VERSION = "1.106.0"
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False", "LITELLM_LOG": "ERROR"}
START_S, POLL_S = 120.0, 0.2
OPEN = 64  # sessions that share the calls of one measurement, as agents do
MS = 1000.0
ADDED = {"first_p50": "first_p50", "first_p99": "first_p99", "p50": "late_p50", "p99": "late_p99"}
"""The figure whose difference is the latency added to the first byte and to the whole reply."""
HEADER = (
    *("engine", "calls", "arm", "calls/s", "CPU ms/call", "median ms", "p99 ms"),
    *("added to first: median", "p99", "added to whole: median", "p99"),
)


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
        return cpu_s([process, *process.children(recursive=True)])

    @asynccontextmanager
    async def requests(self, requests: Sequence[BenchRequest]) -> AsyncGenerator[list[BenchRequest], None]:
        """The requests as encoded HTTP, to be sent in turn, over and over; sessions are closed with the block."""
        if self.admin_key is None:
            yield [replace(request, body=http_request(CHAT, request.body, self.key)) for request in requests]
            return
        connection = await BenchConnection.open("127.0.0.1", self.port)
        sessions = [await connection.ask(SESSIONS, {"uid": "bench"}, self.admin_key) for _ in range(OPEN)]
        yield [
            replace(request, body=http_request(f"/s/{session['key']}{CHAT}", request.body))
            for session, request in zip(sessions, cycle(requests), strict=False)
        ]
        for session in sessions:
            await connection.ask(f"{SESSIONS}/{session['session_id']}/close", {}, self.admin_key)
        connection.close()


def install_litellm() -> Path:
    """Makes the environment in SEAMLESS_CACHE, or the user's cache folder, unless it exists; returns the command.

    Raises:
        subprocess.CalledProcessError: pip could not install it; its output is on stderr.
    """
    base = os.environ.get("SEAMLESS_CACHE") or os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
    folder = Path(base) / "seamless_verl" / f"litellm-{LITELLM_VERSION}"
    complete = folder / ".complete"
    if not complete.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", f"litellm[proxy]=={LITELLM_VERSION}"]
        subprocess.run(pip, check=True)
        complete.touch()
    return folder / "bin" / "litellm"


@contextmanager
def litellm_proxy(folder: Path, engine_port: int, core: int) -> Iterator[GatewayArm]:
    """A proxy of one worker for the engine's OpenAI API, without database or logs; it does not start without a key.

    Raises:
        RuntimeError: it does not listen.
    """
    params = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{engine_port}/v1", "api_key": "none"}
    config, key = folder / "litellm.json", f"sk-{secrets.token_hex(32)}"
    config.write_text(json.dumps({"model_list": [{"model_name": MODEL, "litellm_params": params}]}))  # YAML, too
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    options = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    env, until = OFFLINE | {"LITELLM_MASTER_KEY": key}, time.monotonic() + START_S
    with (
        (folder / "litellm.log").open("w") as log,
        child_process([str(install_litellm()), *options], core=core, env=env, log=log) as process,
    ):
        while not listens(port):  # it gives no other sign that it is ready
            time.sleep(POLL_S)
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the LiteLLM proxy does not listen: {Path(log.name).read_text()[-2000:]}")
        yield GatewayArm("litellm", port, process.pid, key)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def start_arms(measured: int, *, litellm: bool) -> Iterator[list[GatewayArm]]:
    """Starts all processes on their cores, and ends them with the block; the first arm is the engine itself."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gateway-bench-")))
        stub, (gateway,) = stack.enter_context(gateways(folder, 1, 1, 1, 0.0))
        openai = stub.ports[-1]
        arms = [
            GatewayArm("direct", openai, stub.process.pid),
            GatewayArm("gateway", gateway.ports[0], gateway.process.pid, admin_key=ADMIN_KEY),
        ]
        if litellm:
            arms.append(stack.enter_context(litellm_proxy(folder, openai, measured)))
        yield arms


Timings = Sequence[tuple[ReplyTiming, BenchRequest]]
Window = dict[str, float]
"""One arm measured once: calls a second, seconds to the first byte and to the last, and CPU seconds a call.

`late` is the time to the last byte less what the engine itself takes for the tokens, for replies that differ in length.
CPU is of the arm's own process; it is what other work on the machine disturbs least.
"""


def window_of(timings: Timings, seconds: float, cpu: float) -> Window:
    found = {"rate": len(timings) / seconds, "cpu": cpu / len(timings)}
    times = {
        "first_": [timing.first for timing, _ in timings],
        "": [timing.whole for timing, _ in timings],
        "late_": [timing.whole - request.engine_s for timing, request in timings],
    }
    for name, values in times.items():
        found[f"{name}p50"] = median(values)
        found[f"{name}p99"] = quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]
    return found


@dataclass
class Measurement:
    """All rounds of one pacing and shape, by arm."""

    pacing: Pacing
    shape: Shape
    windows: dict[str, list[Window]] = field(default_factory=dict)

    def median_of(self, arm: str, figure: str) -> float:
        """The median of a `Window`'s figure over the rounds."""
        return median(window[figure] for window in self.windows[arm])

    def added(self, arm: str, figure: str) -> float:
        """What the arm adds to the direct call, in seconds: the median of the rounds' differences."""
        return median(one - direct for one, direct in self.pairs(arm, "direct", figure))

    def ratio(self, above: str, below: str, figure: str) -> float:
        return median(one / other for one, other in self.pairs(above, below, figure))

    def pairs(self, one: str, other: str, figure: str) -> list[tuple[float, float]]:
        """A figure of two arms in each round."""
        return [(a[figure], b[figure]) for a, b in zip(self.windows[one], self.windows[other], strict=True)]


async def measure(arms: Sequence[GatewayArm], pacing: Pacing, *, rounds: int, seconds: float) -> list[Measurement]:
    """`seconds` for each arm, shape and round, after one round that is not counted; each arm is first in its turn."""
    connection = await BenchConnection.open("127.0.0.1", arms[0].port)
    await connection.ask("/pacing", [pacing.tokens_per_chunk, pacing.delay_s])
    connection.close()
    measurements = [Measurement(pacing, shape) for shape in shapes(pacing)]
    for number in range(-1, rounds):
        first = number % len(arms)
        for measurement in measurements:
            for arm in (*arms[first:], *arms[:first]):
                duration_s = seconds if number >= 0 else min(seconds, 1.0)
                window = await measure_window(arm, pacing, measurement.shape, duration_s)
                if number >= 0:
                    measurement.windows.setdefault(arm.name, []).append(window)
    return measurements


async def measure_window(arm: GatewayArm, pacing: Pacing, shape: Shape, seconds: float) -> Window:
    connections = [await BenchConnection.open("127.0.0.1", arm.port) for _ in range(shape.concurrent)]
    try:
        async with arm.requests(shape.requests(pacing)) as requests:
            began, used = perf_counter(), arm.cpu_s()
            in_turn, until = cycle(requests), began + seconds
            callers = [
                send_repeatedly(connection, in_turn, shape.start_delay_s(caller, pacing), until)
                for caller, connection in enumerate(connections)
            ]
            timings = [timing for of_caller in await asyncio.gather(*callers) for timing in of_caller]
            return window_of(timings, perf_counter() - began, arm.cpu_s() - used)
    finally:
        for connection in connections:
            connection.close()


async def send_repeatedly(
    connection: BenchConnection, requests: Iterator[BenchRequest], start_delay_s: float, until: float
) -> Timings:
    await asyncio.sleep(start_delay_s)  # what the shape asks for: callers that began together would stay in step
    timings: list[tuple[ReplyTiming, BenchRequest]] = []
    while not timings or perf_counter() < until:
        request = next(requests)
        timings.append((await connection.send(request.body), request))
    return timings


def report_rows(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """A row for each arm, shape and pacing: medians over the rounds, in milliseconds."""
    return [
        {
            "pacing": asdict(measurement.pacing),
            "concurrent": measurement.shape.concurrent,
            "callers": measurement.shape.callers,
            "stream": measurement.shape.stream,
            "arm": arm,
            "rate": measurement.median_of(arm, "rate"),
            **{f"{name}_ms": measurement.median_of(arm, name) * MS for name in (*ADDED, "cpu")},
            **{f"added_{name}_ms": measurement.added(arm, figure) * MS for name, figure in ADDED.items()},
            "rates": [window["rate"] for window in windows],
        }
        for measurement in measurements
        for arm, windows in measurement.windows.items()
    ]


def report_table(measurements: Sequence[Measurement]) -> str:
    rows = []
    for one in measurements:
        for arm in one.windows:
            values = (one.median_of(arm, "rate"), *(one.median_of(arm, name) * MS for name in ("cpu", "p50", "p99")))
            added = ("" if arm == "direct" else f"{one.added(arm, figure) * MS:.2f}" for figure in ADDED.values())
            rows.append((one.pacing.name, one.shape.name, arm, *(f"{value:.2f}" for value in values), *added))
    return text_table(HEADER, rows)


def litellm_ratios(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """By pacing and shape, medians of rounds: our calls a second over LiteLLM's, its CPU seconds a call over ours."""
    return {
        f"{one.pacing.name}, {one.shape.name}": {
            "rate": one.ratio("gateway", "litellm", "rate"),
            "cpu": one.ratio("litellm", "gateway", "cpu"),
        }
        for one in measurements
        if "litellm" in one.windows
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, prints a table, and writes JSON."""
    parser = bench_parser("gateway", __doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each arm, shape and round")
    parser.add_argument("--pacings", nargs="+", choices=list(PACINGS), default=list(PACINGS), help="of the stub engine")
    parser.add_argument("--no-litellm", action="store_true", help="leave the proxy out, and its installation")
    parser.add_argument("--prepare", action="store_true", help="install the proxy into the cache folder, and end")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    args = parser.parse_args(argv)
    if args.prepare:
        sys.stdout.write(f"{install_litellm()}\n")
        return 0
    core, (measured, *_) = split_cores()
    with start_arms(measured, litellm=not args.no_litellm) as arms, pinned_to(core):
        made = (measure(arms, PACINGS[name], rounds=args.rounds, seconds=args.seconds) for name in args.pacings)
        measurements = [measurement for one in made for measurement in uvloop.run(one)]
    ratios = litellm_ratios(measurements)
    sys.stdout.write(f"{report_table(measurements)}\n{json.dumps({'times_litellm': ratios})}\n")
    if args.out:
        pinning = f"client and engine on core {core}, gateway and proxy on core {measured}"
        machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "pinning": pinning}
        report = {"machine": machine, "rows": report_rows(measurements), "times_litellm": ratios}
        args.out.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
