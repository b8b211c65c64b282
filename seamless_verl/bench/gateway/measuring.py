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
from seamless_verl.bench.gateway.pace import Pace, Shape, chat


@dataclass(frozen=True)
class Stint:
    """One arm measured once: calls a second, seconds to the first byte and to the last, and CPU seconds a call.

    The last is of the arm's own process, and what other work on the machine disturbs least.
    """

    calls: int
    rate: float
    first_p50: float
    p50: float
    p99: float
    cpu: float

    @classmethod
    def of(cls, timed: Sequence[Timed], seconds: float, cpu: float) -> Stint:
        whole = [one.whole for one in timed]
        return cls(
            len(timed),
            len(timed) / seconds,
            median(one.first for one in timed),
            median(whole),
            quantiles(whole, n=100, method="inclusive")[98] if len(whole) > 1 else whole[0],
            cpu / len(timed),
        )


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


async def measure(place: Place, pace: Pace, shapes: Sequence[Shape], *, rounds: int, seconds: float) -> list[Measured]:
    """`seconds` for each arm, shape and round, after one round that is not counted."""
    await place.pace(pace)
    all_of_it = [Measured(pace, shape) for shape in shapes]
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
        async with arm.requests(chat(pace, stream=shape.stream)) as requests:
            began, used = perf_counter(), arm.cpu_s()
            turns, until = cycle(requests), began + seconds
            ways = [_keep_asking(connection, turns, until) for connection in connections]
            timed = [one for way in await asyncio.gather(*ways) for one in way]
            return Stint.of(timed, perf_counter() - began, arm.cpu_s() - used)
    finally:
        for connection in connections:
            connection.close()


async def _keep_asking(connection: Connection, requests: Iterator[bytes], until: float) -> list[Timed]:
    timed = [await connection.ask(next(requests))]
    while perf_counter() < until:
        timed.append(await connection.ask(next(requests)))
    return timed
