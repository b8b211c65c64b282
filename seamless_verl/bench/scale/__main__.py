"""How many sessions the gateway holds: `python -m seamless_verl.bench.scale`.

Engines are stubs that give a token every 20 ms; gateway, journal, transport and sessions are the product's, a process
for each shard. Agents do `--turns` calls with a tool between two of them. A row is one window:

- calls/s and tokens/s: what the agents got;
- late: what a call took beyond the engine's own time, median and 99th percentile;
- CPU ms a call, and the shards' share of their cores: one process is full at 100%;
- a shard's limit: calls a second at which it would be full, from its CPU a call;
- KiB a session: what the shards' memory grew by, from before the first session to the window's end, for each open one.

Agents and engines share the first core. Each shard has a core of its own, as long as there are some left.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from statistics import median, quantiles

import psutil
import uvloop

from seamless_verl.bench.gateway.arms import child_process, read_ports
from seamless_verl.bench.gateway.load import Pacing
from seamless_verl.bench.scale.sessions import Served, Work, run_agents
from seamless_verl.compare.processes import exit_on_signals
from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.runtime.tables import text_table

TOKEN_S, CHUNK = (
    0.02,
    16,
)  # of an engine: seconds a token, and the tokens that it gives at once to nobody who reads along
SPARE_FILES = 500  # of a process, beside one connection a session
HEADER = (
    *("shards", "sessions", "calls/s", "tokens/s", "late ms: median", "p99"),
    *("CPU ms/call", "cores used", "a shard's limit, calls/s", "KiB/session"),
)


@dataclass(frozen=True)
class SessionLoad:
    """One window: seconds and bytes."""

    shards: int
    sessions: int
    calls: int
    seconds: float
    tokens: int
    late_s: float
    late_p99_s: float
    cpu_s: float
    grown_bytes: int

    @property
    def rate(self) -> float:
        return self.calls / self.seconds

    @property
    def limit(self) -> float:
        """Calls a second of a shard that has a core and is full."""
        return self.calls / self.cpu_s

    def cells(self) -> tuple[str, ...]:
        late, used = (f"{value * 1000:.1f}" for value in (self.late_s, self.late_p99_s)), self.cpu_s / self.seconds
        cpu_ms, kib = 1000 * self.cpu_s / self.calls, self.grown_bytes / self.sessions / 1024
        rates = (f"{self.rate:,.0f}", f"{self.tokens / self.seconds:,.0f}")
        numbers = (f"{cpu_ms:.2f}", f"{used:.0%} of {self.shards}", f"{self.limit:,.0f}", f"{kib:.0f}")
        return str(self.shards), f"{self.sessions:,}", *rates, *late, *numbers


@contextmanager
def processes(replicas: int, shards: int) -> Iterator[tuple[list[int], list[psutil.Process]]]:
    """The shards' ports and processes, connected to stub engines; all end with the block."""
    from seamless_verl.tiny import make_model

    first, *others = sorted(os.sched_getaffinity(0))
    cores = others or [first]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scale-bench-")))
        make_model("nano", 0, folder / "model")
        engines = _python("scale.engines", str(replicas), str(CHUNK), str(CHUNK * TOKEN_S))
        engine_ports = read_ports(stack.enter_context(child_process(engines, pinned={first})))
        gateways = []
        for shard in range(shards):
            command = _python("gateway.gateway_process", str(folder / "model"), str(folder / f"journal-{shard}.sqlite"))
            pinned = {cores[shard % len(cores)]}
            gateways.append(stack.enter_context(child_process([*command, *map(str, engine_ports)], pinned=pinned)))
        ports = [read_ports(gateway)[0] for gateway in gateways]
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {first})
        stack.callback(os.sched_setaffinity, 0, allowed)
        yield ports, [psutil.Process(gateway.pid) for gateway in gateways]


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"seamless_verl.bench.{module}", *arguments]


def measure(shards: int, sessions: int, replicas: int, work: Work, seconds: float) -> SessionLoad:
    """One window of so many open sessions, in processes of its own."""
    with processes(replicas, shards) as (ports, gateways):
        empty, used = _resident(gateways), 0.0

        def window_began() -> None:
            nonlocal used
            used = _cpu_s(gateways)

        settle_s = 2 * work.turn_s
        served, window_s = uvloop.run(run_agents(sessions, ports, work, seconds, settle_s, window_began))
        cpu_s, grown = _cpu_s(gateways) - used, _resident(gateways) - empty
    return _row(shards, sessions, served, window_s, work, cpu_s, grown)


def _row(
    shards: int, sessions: int, served: Served, seconds: float, work: Work, cpu_s: float, grown: int
) -> SessionLoad:
    if len(served.late) < 2:
        raise ConfigError("--seconds", seconds, "hardly a call ended in the window", "Give a longer window")
    calls, p99 = len(served.late), quantiles(served.late, n=100, method="inclusive")[98]
    return SessionLoad(
        shards, sessions, calls, seconds, calls * work.pacing.tokens, median(served.late), p99, cpu_s, grown
    )


def _cpu_s(gateways: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in gateways]
    return float(sum(time.user + time.system for time in times))


def _resident(gateways: Sequence[psutil.Process]) -> int:
    return sum(int(process.memory_info().rss) for process in gateways)


def check_sessions(sessions: Sequence[int]) -> None:
    """ConfigError where a process may not open a connection for each session."""
    files, _ = getrlimit(RLIMIT_NOFILE)
    for number in sessions:
        if number < 1 or number > files - SPARE_FILES:
            way_out = f"Give 1 to {files - SPARE_FILES}, or raise the limit of open files (ulimit -n)"
            raise ConfigError("--sessions", number, "each has a connection, which is an open file", way_out)


def check_processes(shards: Sequence[int], replicas: int) -> None:
    """ConfigError where there would be nobody to serve, or to generate."""
    if min(shards) < 1:
        raise ConfigError("--shards", min(shards), "serves no session", "Give 1 or more of each")
    if replicas < 1:
        raise ConfigError("--replicas", replicas, "generates nothing", "Give 1 or more")


@exits_on_config_error
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line for an argument that cannot work."""
    options = _parser().parse_args(argv)
    check_sessions(options.sessions)
    check_processes(options.shards, options.replicas)
    pacing = Pacing("real", options.tokens, CHUNK, CHUNK * TOKEN_S)
    work = Work(options.turns, options.tool_s, pacing)
    rows = []
    for shards, sessions in product(options.shards, options.sessions):
        rows.append(measure(shards, sessions, options.replicas, work, options.seconds))
        sys.stderr.write(f"{shards} shards, {sessions} sessions: {rows[-1].rate:.0f} calls/s\n")
    sys.stdout.write(f"{text_table(HEADER, [row.cells() for row in rows])}\n")
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m seamless_verl.bench.scale", description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=_numbers, default=[250, 1000, 4000], help="open at once, by commas")
    parser.add_argument("--shards", type=_numbers, default=[1, 2], help="processes that serve them, by commas")
    parser.add_argument("--replicas", type=int, default=16, help="stub engines, of 256 seats each")
    parser.add_argument("--turns", type=int, default=5, help="calls of a session")
    parser.add_argument("--tokens", type=int, default=64, help="of a reply")
    parser.add_argument("--tool-s", type=float, default=10.0, help="seconds of a tool, on the mean")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a window")
    parser.add_argument("--out", type=Path, help="where the rows go as JSON")
    return parser


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
