"""How many sessions the gateway holds: `python -m seamless_verl.tools.bench.scale`.

Engines are stubs that give a token every 20 ms; gateway, journal, transport and sessions are the product's, a process
for each shard. Agents do `--turns` calls with a tool between two of them. A row is one window:

- calls/s and tokens/s: what the agents got;
- late: what a call took beyond the engine's own time, median and 99th percentile;
- CPU ms a call, and how much the shards used of the cores that they may use together: at 100% all are full;
- a shard's limit: calls a second at which one with a whole core would be full, from its CPU a call;
- KiB a session: what the shards' memory grew by, from before the first session to the window's end, for each open one;
- agents' core: how much agents and engines used of theirs. Near 100% they were the limit, and not the shards.

Agents and engines share the first core. Each shard has a core of its own, as long as there are some left.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from random import Random
from resource import RLIMIT_NOFILE, getrlimit
from statistics import median, quantiles
from time import perf_counter

import psutil
import uvloop

from seamless_verl.cli.output import text_table
from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tools.bench.load import (
    ADMIN_KEY,
    CHAT,
    MODEL,
    QUESTION,
    SESSIONS,
    BenchConnection,
    Pacing,
    http_request,
)
from seamless_verl.tools.bench.shared import bench_parser, cpu_s, gateways, numbers, pinned_to, split_cores
from seamless_verl.tools.compare.running import exit_on_signals

TOKEN_S = 0.02  # of an engine
CHUNK = 16  # tokens that it gives at once to nobody who reads along
SPARE_FILES = 500  # of a process, beside one connection a session
SETTLE_CALLS = 2  # of an agent on the mean, before the window
HEADER = (
    *("shards", "sessions", "calls/s", "tokens/s", "late ms: median", "p99"),
    *("CPU ms/call", "cores used", "a shard's limit, calls/s", "KiB/session", "agents' core"),
)


@dataclass(frozen=True)
class SessionLoad:
    """One window: seconds and bytes. The shards may use `cores` together."""

    shards: int
    cores: int
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
        used = self.cpu_s / self.seconds
        return (
            *(str(self.shards), f"{self.sessions:,}", f"{self.rate:,.0f}", f"{self.tokens / self.seconds:,.0f}"),
            *(f"{self.late_s * 1000:.1f}", f"{self.late_p99_s * 1000:.1f}", f"{1000 * self.cpu_s / self.calls:.2f}"),
            *(f"{used / self.cores:.0%} of {self.cores}", f"{self.limit:,.0f}"),
            *(f"{self.grown_bytes / self.sessions / 1024:.0f}", f"{self.agents_cpu_s / self.seconds:.0%}"),
        )


@dataclass(frozen=True)
class Work:
    """What each session does: `turns` calls of so many tokens, with a tool of `tool_s` seconds on the mean between two.

    The seconds of a tool are exponential, as the times of many independent causes are.
    """

    turns: int
    tool_s: float
    pacing: Pacing

    @property
    def call_s(self) -> float:
        """Seconds that an engine itself takes for a call."""
        return self.pacing.engine_s(self.pacing.tokens)

    @property
    def turn_s(self) -> float:
        """Seconds from one call's begin to the next one's, where nothing waits."""
        return self.call_s + self.tool_s


@dataclass
class Served:
    """What the agents saw in a window: `late` is each call's time less what the engine takes, in seconds.

    `settled` is set when `settle_calls` have ended, in a window or not.
    """

    late: list[float] = field(default_factory=list)
    settle_calls: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    counting: bool = False

    def call_ended(self, late_s: float) -> None:
        self.settle_calls -= 1
        if self.settle_calls == 0:
            self.settled.set()
        if self.counting:
            self.late.append(late_s)


async def run_agent(number: int, port: int, work: Work, served: Served) -> None:
    """Session after session over a connection of its own to one shard, until it is cancelled.

    The first begins at a random moment of a turn and ends after a random turn. Else the agents of a full shard, who
    wait for the same, would stay in step: all would have short conversations at once, and then long ones.
    """
    draw = Random(number)
    connection = await BenchConnection.open("127.0.0.1", port)
    try:
        await asyncio.sleep(draw.uniform(0, work.turn_s))  # agents do not begin together
        turns = draw.randint(1, work.turns)
        while True:
            opened = await connection.ask(SESSIONS, {"uid": f"agent-{number}"}, ADMIN_KEY)
            messages = [{"role": "user", "content": QUESTION}]
            for turn in range(turns):
                if turn:
                    await asyncio.sleep(draw.expovariate(1 / work.tool_s))  # the tool
                body = {"model": MODEL, "messages": messages, "max_tokens": work.pacing.tokens}
                timing = await connection.send(http_request(f"/s/{opened['key']}{CHAT}", json.dumps(body).encode()))
                served.call_ended(timing.whole - work.call_s)
                reply = json.loads(connection.body)["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": reply})
                messages.append({"role": "user", "content": "It says: nothing."})
            await connection.ask(f"{SESSIONS}/{opened['session_id']}/close", {}, ADMIN_KEY)
            turns = work.turns
    finally:
        connection.close()


async def run_agents(
    sessions: int, ports: Sequence[int], work: Work, seconds: float, at_edge: Callable[[], None]
) -> tuple[Served, float]:
    """So many sessions at once, divided among the shards at `ports`; what they saw in a window, and how long it was.

    Before it all of them begin, and have `SETTLE_CALLS` calls each on the mean: full shards take longer for them than
    two turns. `at_edge` is called as the window begins, and as it ends.

    Raises:
        BadReplyError: a call failed.
    """
    served = Served(settle_calls=SETTLE_CALLS * sessions)
    async with asyncio.TaskGroup() as group:
        ported = [(number, ports[number % len(ports)]) for number in range(sessions)]
        tasks = [group.create_task(run_agent(number, port, work, served)) for number, port in ported]
        await asyncio.sleep(SETTLE_CALLS * work.turn_s)  # so long shards that are not full need for these calls
        await served.settled.wait()
        at_edge()
        began, served.counting = perf_counter(), True
        await asyncio.sleep(seconds)  # the window
        served.counting, ended = False, perf_counter()
        at_edge()
        for task in tasks:
            task.cancel()
    return served, ended - began


def measure(shards: int, sessions: int, replicas: int, work: Work, seconds: float) -> SessionLoad:
    """One window of so many open sessions, in processes of its own.

    Raises:
        ConfigError: hardly a call ended.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scale-bench-")))
        engines, started = stack.enter_context(gateways(folder, shards, replicas, CHUNK, CHUNK * TOKEN_S))
        stack.enter_context(pinned_to(split_cores()[0]))
        served_by, agents = [gateway.process for gateway in started], [psutil.Process(), engines.process]
        empty, used = resident(served_by), list[tuple[float, float]]()

        def at_edge() -> None:
            used.append((cpu_s(served_by), cpu_s(agents)))

        ports = [gateway.ports[0] for gateway in started]
        served, window_s = uvloop.run(run_agents(sessions, ports, work, seconds, at_edge))
        grown = resident(served_by) - empty
    if len(served.late) < 2:
        raise ConfigError("--seconds", seconds, "hardly a call ended in the window", "Give a longer window")
    shards_cpu_s, agents_cpu_s = (end - begin for begin, end in zip(*used, strict=True))
    return SessionLoad(
        shards=shards,
        cores=min(shards, len(split_cores()[1])),
        sessions=sessions,
        calls=len(served.late),
        seconds=window_s,
        tokens=len(served.late) * work.pacing.tokens,
        late_s=median(served.late),
        late_p99_s=quantiles(served.late, n=100, method="inclusive")[98],
        cpu_s=shards_cpu_s,
        agents_cpu_s=agents_cpu_s,
        grown_bytes=grown,
    )


def resident(processes: Sequence[psutil.Process]) -> int:
    """Their memory in bytes."""
    return sum(int(process.memory_info().rss) for process in processes)


def check_sizes(sessions: Sequence[int], shards: Sequence[int], replicas: int) -> None:
    """ConfigError where a process may not open a connection for each session, or nobody would serve or generate."""
    files, _ = getrlimit(RLIMIT_NOFILE)
    for number in sessions:
        if number < 1 or number > files - SPARE_FILES:
            way_out = f"Give 1 to {files - SPARE_FILES}, or raise the limit of open files (ulimit -n)"
            raise ConfigError("--sessions", number, "each has a connection, which is an open file", way_out)
    if min(shards) < 1:
        raise ConfigError("--shards", min(shards), "serves no session", "Give 1 or more of each")
    if replicas < 1:
        raise ConfigError("--replicas", replicas, "generates nothing", "Give 1 or more")


@exits_on_config_error
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line for an argument that cannot work."""
    parser = bench_parser("scale", __doc__)
    parser.add_argument("--sessions", type=numbers, default=[250, 1000, 4000], help="open at once, by commas")
    parser.add_argument("--shards", type=numbers, default=[1, 2], help="processes that serve them, by commas")
    parser.add_argument("--replicas", type=int, default=16, help="stub engines, of 256 seats each")
    parser.add_argument("--turns", type=int, default=5, help="calls of a session")
    parser.add_argument("--tokens", type=int, default=64, help="of a reply")
    parser.add_argument("--tool-s", type=float, default=10.0, help="seconds of a tool, on the mean")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a window")
    parser.add_argument("--out", type=Path, help="where the rows go as JSON")
    options = parser.parse_args(argv)
    check_sizes(options.sessions, options.shards, options.replicas)
    work = Work(options.turns, options.tool_s, Pacing("real", options.tokens, CHUNK, CHUNK * TOKEN_S))
    rows = []
    for shards, sessions in product(options.shards, options.sessions):
        rows.append(measure(shards, sessions, options.replicas, work, options.seconds))
        sys.stderr.write(f"{shards} shards, {sessions} sessions: {rows[-1].rate:.0f} calls/s\n")
    sys.stdout.write(f"{text_table(HEADER, [row.cells() for row in rows])}\n")
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
