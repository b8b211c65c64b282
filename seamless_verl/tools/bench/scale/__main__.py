"""How many sessions the gateway holds: `python -m seamless_verl.tools.bench.scale`.

Engines are stubs that give a token every 20 ms; gateway, journal, transport and sessions are the product's, a process
for each shard. Agents do `--turns` calls with a tool between two of them. A row is one window:

- calls/s and tokens/s: what the agents got;
- late: what a call took beyond the engine's own time, median and 99th percentile;
- CPU ms a call, and how much the shards used of the cores that they may use together: at 100% all are full;
- a shard's limit: calls a second at which one with a whole core would be full, from its CPU a call;
- KiB a session: what the shards' memory grew by, from before the first session to the window's end, for each open one;
- agents' core: how much agents and engines used of theirs. Near 100% they were the limit, and not the shards.

Agents and engines share the first core. Each shard has a core of its own, as long as there are some left. With
`--core-share 0.25` it may use a quarter of a core alone, so that several fit on one and each still adds as much.
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
from math import ceil
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from statistics import median, quantiles

import psutil
import uvloop

from seamless_verl.cli.output import text_table
from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tools.bench.gateway.arms import child_process, module, read_ports
from seamless_verl.tools.bench.gateway.load import Pacing
from seamless_verl.tools.bench.scale.core_share import KEY, check_share, limited_to
from seamless_verl.tools.bench.scale.sessions import Served, Work, run_agents
from seamless_verl.tools.compare.running import exit_on_signals

TOKEN_S = 0.02  # of an engine
CHUNK = 16  # tokens that it gives at once to nobody who reads along
SPARE_FILES = 500  # of a process, beside one connection a session
HEADER = (
    *("shards", "sessions", "calls/s", "tokens/s", "late ms: median", "p99"),
    *("CPU ms/call", "cores used", "a shard's limit, calls/s", "KiB/session", "agents' core"),
)


@dataclass(frozen=True)
class SessionLoad:
    """One window: seconds and bytes. The shards may use `cores` together, each `core_share` of one, or all of it."""

    shards: int
    core_share: float | None
    cores: float
    sessions: int
    calls: int
    seconds: float
    tokens: int
    late_s: float
    late_p99_s: float
    cpu_s: float
    agents_cpu_s: float
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
        cores = (f"{cpu_ms:.2f}", f"{used / self.cores:.0%} of {self.cores:g}", f"{self.limit:,.0f}")
        numbers = (*rates, *late, *cores, f"{kib:.0f}", f"{self.agents_cpu_s / self.seconds:.0%}")
        return str(self.shards), f"{self.sessions:,}", *numbers


@dataclass(frozen=True)
class Processes:
    """What runs in a window: the shards with their ports, and the agents with the engines, which share a core."""

    ports: tuple[int, ...]
    shards: tuple[psutil.Process, ...]
    agents: tuple[psutil.Process, ...]

    def cpu_s(self) -> tuple[float, float]:
        """Seconds that the shards have used so far, and the agents."""
        return _cpu_s(self.shards), _cpu_s(self.agents)

    def resident(self) -> int:
        """The shards' memory in bytes."""
        return sum(int(process.memory_info().rss) for process in self.shards)


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(time.user + time.system for time in times))


@contextmanager
def start_processes(replicas: int, shards: int, core_share: float | None) -> Iterator[Processes]:
    """Shards that are connected to stub engines; all end with the block."""
    from seamless_verl.tiny import make_model

    first, cores = split_cores()
    with ExitStack() as stack:
        limits = [stack.enter_context(limited_to(core_share)) for _ in range(shards)]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scale-bench-")))
        make_model("nano", 0, folder / "model")
        command = module("stub_process", replicas, CHUNK, CHUNK * TOKEN_S)
        engines = stack.enter_context(child_process(command, pinned={first}))
        *engine_ports, _ = read_ports(engines)
        gateways = []
        for shard in range(shards):
            command = module("gateway_process", folder / "model", folder / f"journal-{shard}.sqlite", *engine_ports)
            gateways.append(stack.enter_context(child_process(command, pinned={cores[shard % len(cores)]})))
        ports = tuple(read_ports(gateway)[0] for gateway in gateways)
        for limit, gateway in zip(limits, gateways, strict=True):  # not before: a start would take a minute longer
            limit(gateway.pid)
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {first})
        stack.callback(os.sched_setaffinity, 0, allowed)
        served_by = tuple(psutil.Process(gateway.pid) for gateway in gateways)
        yield Processes(ports, served_by, (psutil.Process(), psutil.Process(engines.pid)))


def split_cores() -> tuple[int, list[int]]:
    """The core of agents and engines, and those of the shards; the same one on a machine with one core."""
    first, *others = sorted(os.sched_getaffinity(0))
    return first, others or [first]


def measure(
    shards: int, sessions: int, replicas: int, work: Work, seconds: float, core_share: float | None = None
) -> SessionLoad:
    """One window of so many open sessions, in processes of its own.

    Raises:
        ConfigError: hardly a call ended, or the shards cannot be limited to `core_share` of a core each.
    """
    cores = usable_cores(shards, core_share, len(split_cores()[1]))
    with start_processes(replicas, shards, core_share) as processes:
        empty, used = processes.resident(), list[tuple[float, float]]()

        def at_edge() -> None:
            used.append(processes.cpu_s())

        served, window_s = uvloop.run(run_agents(sessions, processes.ports, work, seconds, at_edge))
        grown = processes.resident() - empty
    late_s, late_p99_s = _late(served, seconds)
    cpu_s, agents_cpu_s = (end - begin for begin, end in zip(*used, strict=True))
    return SessionLoad(
        shards=shards,
        core_share=core_share,
        cores=cores,
        sessions=sessions,
        calls=len(served.late),
        seconds=window_s,
        tokens=len(served.late) * work.pacing.tokens,
        late_s=late_s,
        late_p99_s=late_p99_s,
        cpu_s=cpu_s,
        agents_cpu_s=agents_cpu_s,
        grown_bytes=grown,
    )


def _late(served: Served, seconds: float) -> tuple[float, float]:
    """Median and 99th percentile of what calls took beyond the engine's time, in seconds."""
    if len(served.late) < 2:
        raise ConfigError("--seconds", seconds, "hardly a call ended in the window", "Give a longer window")
    return median(served.late), quantiles(served.late, n=100, method="inclusive")[98]


def usable_cores(shards: int, core_share: float | None, cores: int) -> float:
    """How many cores the shards may use together, where there are `cores` for them.

    Raises:
        ConfigError: the share is none of a core, or shards on the same core may use more than all of it.
    """
    if core_share is None:
        return min(shards, cores)
    check_share(core_share)
    on_a_core = ceil(shards / cores)
    if on_a_core * core_share > 1:
        way_out = f"Give at most {1 / on_a_core:.3g}, or fewer shards"
        raise ConfigError(KEY, core_share, f"{on_a_core} of {shards} shards share a core here", way_out)
    return shards * core_share


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
    for shards in options.shards:
        usable_cores(shards, options.core_share, len(split_cores()[1]))
    pacing = Pacing("real", options.tokens, CHUNK, CHUNK * TOKEN_S)
    work = Work(options.turns, options.tool_s, pacing)
    rows = []
    for shards, sessions in product(options.shards, options.sessions):
        rows.append(measure(shards, sessions, options.replicas, work, options.seconds, options.core_share))
        sys.stderr.write(f"{shards} shards, {sessions} sessions: {rows[-1].rate:.0f} calls/s\n")
    sys.stdout.write(f"{text_table(HEADER, [row.cells() for row in rows])}\n")
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m seamless_verl.tools.bench.scale", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--sessions", type=_numbers, default=[250, 1000, 4000], help="open at once, by commas")
    parser.add_argument("--shards", type=_numbers, default=[1, 2], help="processes that serve them, by commas")
    share_help = "of a core, that each shard may use; by default all of it"
    parser.add_argument("--core-share", type=float, metavar="SHARE", help=share_help)
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
