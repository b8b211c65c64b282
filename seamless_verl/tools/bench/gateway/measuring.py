"""Measures the arms of the gateway bench, and reports the figures as a table and as JSON.

Invariant: in each round the arms are measured one after another, so that other load on the machine meets all of them.
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

from seamless_verl.cli.output import text_table
from seamless_verl.tools.bench.gateway.arms import BenchProcesses, GatewayArm
from seamless_verl.tools.bench.gateway.load import BenchConnection, BenchRequest, Pacing, ReplyTiming, Shape, shapes


@dataclass(frozen=True)
class Window:
    """One arm measured once: calls a second, seconds to the first byte and to the last, and CPU seconds a call.

    `late` is the time to the last byte less what the engine itself takes for the tokens, for replies that differ in
    length. CPU is of the arm's own process; it is what other work on the machine disturbs least.
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
    def of(cls, timings: Sequence[tuple[ReplyTiming, BenchRequest]], seconds: float, cpu: float) -> Window:
        first = _median_and_p99([timing.first for timing, _ in timings])
        whole = _median_and_p99([timing.whole for timing, _ in timings])
        late = _median_and_p99([timing.whole - request.engine_s for timing, request in timings])
        return cls(len(timings), len(timings) / seconds, *first, *whole, *late, cpu / len(timings))


def _median_and_p99(values: Sequence[float]) -> tuple[float, float]:
    return median(values), quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


@dataclass
class Measurement:
    """All rounds of one pacing and shape, by arm."""

    pacing: Pacing
    shape: Shape
    windows: dict[str, list[Window]] = field(default_factory=dict)

    def median_of(self, arm: str, figure: str) -> float:
        """The median of a `Window`'s figure over the rounds."""
        return float(median(getattr(window, figure) for window in self.windows[arm]))

    def added(self, arm: str, figure: str) -> float:
        """What the arm adds to the direct call, in seconds: the median of the rounds' differences."""
        pairs = zip(self.windows[arm], self.windows["direct"], strict=True)
        return float(median(getattr(window, figure) - getattr(direct, figure) for window, direct in pairs))


async def measure(processes: BenchProcesses, pacing: Pacing, *, rounds: int, seconds: float) -> list[Measurement]:
    """`seconds` for each arm, shape and round, after one round that is not counted."""
    await processes.set_pacing(pacing)
    measurements = [Measurement(pacing, shape) for shape in shapes(pacing)]
    for number in range(-1, rounds):
        for measurement in measurements:
            for arm in _rotated(processes.arms, number):
                duration_s = seconds if number >= 0 else min(seconds, 1.0)
                window = await measure_window(arm, pacing, measurement.shape, duration_s)
                if number >= 0:
                    measurement.windows.setdefault(arm.name, []).append(window)
    return measurements


def _rotated(arms: Sequence[GatewayArm], number: int) -> list[GatewayArm]:
    """The arms in an order in which each comes first in its turn."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


async def measure_window(arm: GatewayArm, pacing: Pacing, shape: Shape, seconds: float) -> Window:
    connections = [await BenchConnection.open("127.0.0.1", arm.port) for _ in range(shape.concurrent)]
    try:
        async with arm.requests(shape.requests(pacing)) as requests:
            began, used = perf_counter(), arm.cpu_s()
            in_turn, until = cycle(requests), began + seconds
            callers = [
                _send_repeatedly(connection, in_turn, shape.start_delay_s(caller, pacing), until)
                for caller, connection in enumerate(connections)
            ]
            timings = [timing for of_caller in await asyncio.gather(*callers) for timing in of_caller]
            return Window.of(timings, perf_counter() - began, arm.cpu_s() - used)
    finally:
        for connection in connections:
            connection.close()


async def _send_repeatedly(
    connection: BenchConnection, requests: Iterator[BenchRequest], start_delay_s: float, until: float
) -> list[tuple[ReplyTiming, BenchRequest]]:
    await asyncio.sleep(start_delay_s)  # what the shape asks for: callers that began together would stay in step
    timings: list[tuple[ReplyTiming, BenchRequest]] = []
    while not timings or perf_counter() < until:
        request = next(requests)
        timings.append((await connection.send(request.body), request))
    return timings


MS = 1000.0
ADDED = {"first_p50": "first_p50", "first_p99": "first_p99", "p50": "late_p50", "p99": "late_p99"}
"""The figure whose difference is the latency added to the first byte and to the whole reply."""
HEADER = (
    *("engine", "calls", "arm", "calls/s", "CPU ms/call", "median ms", "p99 ms"),
    *("added to first: median", "p99", "added to whole: median", "p99"),
)


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
            "rates": [window.rate for window in windows],
        }
        for measurement in measurements
        for arm, windows in measurement.windows.items()
    ]


def report_table(measurements: Sequence[Measurement]) -> str:
    rows = [_cells(measurement, arm) for measurement in measurements for arm in measurement.windows]
    return text_table(HEADER, rows)


def _cells(measurement: Measurement, arm: str) -> tuple[str, ...]:
    milliseconds = (measurement.median_of(arm, figure) * MS for figure in ("cpu", "p50", "p99"))
    added = ("" if arm == "direct" else f"{measurement.added(arm, figure) * MS:.2f}" for figure in ADDED.values())
    numbers = (f"{value:.2f}" for value in (measurement.median_of(arm, "rate"), *milliseconds))
    return measurement.pacing.name, measurement.shape.name, arm, *numbers, *added


def litellm_ratios(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """By pacing and shape, medians of rounds: our calls a second over LiteLLM's, its CPU seconds a call over ours."""
    return {
        f"{measurement.pacing.name}, {measurement.shape.name}": {
            "rate": _median_ratio(measurement, "gateway", "litellm", "rate"),
            "cpu": _median_ratio(measurement, "litellm", "gateway", "cpu"),
        }
        for measurement in measurements
        if "litellm" in measurement.windows
    }


def _median_ratio(measurement: Measurement, above: str, below: str, figure: str) -> float:
    pairs = zip(measurement.windows[above], measurement.windows[below], strict=True)
    return float(median(getattr(a, figure) / getattr(b, figure) for a, b in pairs))


def make_report(measurements: Sequence[Measurement], *, pinning: str) -> dict[str, Any]:
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "pinning": pinning}
    return {
        "machine": machine,
        "rows": report_rows(measurements),
        "times_litellm": litellm_ratios(measurements),
    }
