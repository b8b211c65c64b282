"""Rounds of measurements: arms one after another in each round, so that what else the machine does meets all.

A run as a table and as JSON, and whether it shows what it should.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import cycle
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from seamless_verl.bench.gateway.arms import EnginePlace, GatewayArm
from seamless_verl.bench.gateway.load import Asked, Connection, Pace, Shape, Timed, shapes
from seamless_verl.bench.gateway.record import RecordCost


@dataclass(frozen=True)
class Window:
    """One arm measured once: calls a second, seconds to the first byte and to the last, and CPU seconds a call.

    `late` is the time to the last byte less what the engine itself takes for so many tokens, for replies that differ
    in length. CPU is of the arm's own process, and what other work on the machine disturbs least.
    """

    calls: int
    rate: float
    first_p50: float
    first_p99: float
    p50: float
    p99: float
    late_p50: float
    late_p99: float
    cpu: float

    @classmethod
    def of(cls, timed: Sequence[tuple[Timed, Asked]], seconds: float, cpu: float) -> Window:
        first = _middle_and_end([one.first for one, _ in timed])
        whole = _middle_and_end([one.whole for one, _ in timed])
        late = _middle_and_end([one.whole - asked.takes_s for one, asked in timed])
        return cls(len(timed), len(timed) / seconds, *first, *whole, *late, cpu / len(timed))


def _middle_and_end(values: Sequence[float]) -> tuple[float, float]:
    """The median and the 99th of a hundred."""
    return median(values), quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


@dataclass
class Measured:
    """All rounds of one pace and shape, by arm."""

    pace: Pace
    shape: Shape
    stints: dict[str, list[Window]] = field(default_factory=dict)

    def middle(self, arm: str, what: str) -> float:
        """The median over the rounds."""
        return float(median(getattr(stint, what) for stint in self.stints[arm]))

    def added(self, arm: str, what: str) -> float:
        """Over the direct call, in seconds: the median of the rounds' differences."""
        pairs = zip(self.stints[arm], self.stints["direct"], strict=True)
        return float(median(getattr(mine, what) - getattr(direct, what) for mine, direct in pairs))


async def measure(place: EnginePlace, pace: Pace, *, rounds: int, seconds: float) -> list[Measured]:
    """`seconds` for each arm, shape and round, after one round that is not counted."""
    await place.pace(pace)
    all_of_it = [Measured(pace, shape) for shape in shapes(pace)]
    for number in range(-1, rounds):
        for measured in all_of_it:
            for arm in _turned(place.arms, number):
                stint = await stint_of(arm, pace, measured.shape, seconds if number >= 0 else min(seconds, 1.0))
                if number >= 0:
                    measured.stints.setdefault(arm.name, []).append(stint)
    return all_of_it


def _turned(arms: Sequence[GatewayArm], number: int) -> list[GatewayArm]:
    """Each arm comes first in its turn."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


async def stint_of(arm: GatewayArm, pace: Pace, shape: Shape, seconds: float) -> Window:
    connections = [await Connection.open("127.0.0.1", arm.port) for _ in range(shape.concurrent)]
    try:
        async with arm.requests(shape.asked(pace)) as requests:
            began, used = perf_counter(), arm.cpu_s()
            turns, until = cycle(requests), began + seconds
            ways = [
                _keep_asking(connection, turns, shape.begins_s(caller, pace), until)
                for caller, connection in enumerate(connections)
            ]
            timed = [one for way in await asyncio.gather(*ways) for one in way]
            return Window.of(timed, perf_counter() - began, arm.cpu_s() - used)
    finally:
        for connection in connections:
            connection.close()


async def _keep_asking(
    connection: Connection, turns: Iterator[Asked], begins_s: float, until: float
) -> list[tuple[Timed, Asked]]:
    await asyncio.sleep(begins_s)  # what the shape asks for: callers that began together would stay in step
    timed: list[tuple[Timed, Asked]] = []
    while not timed or perf_counter() < until:
        asked = next(turns)
        timed.append((await connection.ask(asked.body), asked))
    return timed


MS = 1000.0
ADDED = {"first_p50": "first_p50", "first_p99": "first_p99", "p50": "late_p50", "p99": "late_p99"}
"""What the latency added to the first byte and to the whole reply is the difference of."""
HEAD = (
    *("engine", "calls", "arm", "calls/s", "CPU ms/call", "median ms", "p99 ms"),
    *("added to first: median", "p99", "added to whole: median", "p99"),
)


def rows(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One for each arm, shape and pace: medians over the rounds, in milliseconds."""
    return [
        {
            "pace": asdict(one.pace),
            "concurrent": one.shape.concurrent,
            "callers": one.shape.callers,
            "stream": one.shape.stream,
            "arm": arm,
            "rate": one.middle(arm, "rate"),
            **{f"{what}_ms": one.middle(arm, what) * MS for what in ("first_p50", "first_p99", "p50", "p99", "cpu")},
            **{f"added_{what}_ms": one.added(arm, of) * MS for what, of in ADDED.items()},
            "rates": [stint.rate for stint in stints],
        }
        for one in measured
        for arm, stints in one.stints.items()
    ]


def table(measured: Sequence[Measured]) -> str:
    lines: list[tuple[str, ...]] = [HEAD]
    for one in measured:
        for arm in one.stints:
            numbers = (one.middle(arm, "rate"), *(one.middle(arm, what) * MS for what in ("cpu", "p50", "p99")))
            added = ("" if arm == "direct" else f"{one.added(arm, what) * MS:.2f}" for what in ADDED.values())
            lines.append((one.pace.name, one.shape.name, arm, *(f"{value:.2f}" for value in numbers), *added))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def times_litellm(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """By pace and shape: our calls a second over LiteLLM's, and its CPU seconds a call over ours; medians of rounds."""
    return {
        f"{one.pace.name}, {one.shape.name}": {
            "rate": _median_ratio(one, "gateway", "litellm", "rate"),
            "cpu": _median_ratio(one, "litellm", "gateway", "cpu"),
        }
        for one in measured
        if "litellm" in one.stints
    }


def _median_ratio(measured: Measured, above: str, below: str, what: str) -> float:
    pairs = zip(measured.stints[above], measured.stints[below], strict=True)
    return float(median(getattr(a, what) / getattr(b, what) for a, b in pairs))


def report(measured: Sequence[Measured], record: RecordCost, *, pinning: str) -> dict[str, Any]:
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "pinning": pinning}
    return {
        "machine": machine,
        "rows": rows(measured),
        "times_litellm": times_litellm(measured),
        "record": asdict(record),
    }
