"""Rounds of measurements: arms one after another in each round, so that what else the machine does meets all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median, quantiles
from time import perf_counter

from seamless_verl.bench.gateway.arms import Arm, Place
from seamless_verl.bench.gateway.client import Connection, Timed
from seamless_verl.bench.gateway.pace import Asked, Pace, Shape, shapes


@dataclass(frozen=True)
class Stint:
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
    def of(cls, timed: Sequence[tuple[Timed, Asked]], seconds: float, cpu: float) -> Stint:
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
    stints: dict[str, list[Stint]] = field(default_factory=dict)

    def middle(self, arm: str, what: str) -> float:
        """The median over the rounds."""
        return float(median(getattr(stint, what) for stint in self.stints[arm]))

    def added(self, arm: str, what: str) -> float:
        """Over the direct call, in seconds: the median of the rounds' differences."""
        pairs = zip(self.stints[arm], self.stints["direct"], strict=True)
        return float(median(getattr(mine, what) - getattr(direct, what) for mine, direct in pairs))


async def measure(place: Place, pace: Pace, *, rounds: int, seconds: float) -> list[Measured]:
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


def _turned(arms: Sequence[Arm], number: int) -> list[Arm]:
    """Each arm comes first in its turn."""
    first = number % len(arms)
    return [*arms[first:], *arms[:first]]


async def stint_of(arm: Arm, pace: Pace, shape: Shape, seconds: float) -> Stint:
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
            return Stint.of(timed, perf_counter() - began, arm.cpu_s() - used)
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
