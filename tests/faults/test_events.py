"""Lend, reclaim, update, death and resume events in a row on a live run, several at a time: after each, all goes on.

SEAMLESS_EVENTS=1000 makes it as long as the promise, SEAMLESS_SEED draws the same events again.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from events_cases import KINDS, NAMES, BadLuck, Trainer, World, cluster, world
from version_weights import Weights

from seamless_verl.rollout.states import SERVING
from seamless_verl.trainer.data_plane.rollout import Generated

pytestmark = pytest.mark.integration
EVENTS = int(os.environ.get("SEAMLESS_EVENTS", "200"))
SEED = int(os.environ.get("SEAMLESS_SEED", str(random.randrange(1 << 32))))
CALLS, SAMPLES = 32, 150
MOVE_S, EVENT_S, END_S = 30.0, 60.0, 120.0  # for all calls to go on after an event, for an event, for the end


@dataclass
class Sample:
    """A call that has ended."""

    prompt: list[int]
    done: Generated


@dataclass
class Books:
    """What came of it; `samples` are drawn from all calls, as many with several versions as with one."""

    events: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    tokens: int = 0
    overlapping: int = 0
    longest: float = 0.0
    samples: dict[bool, list[tuple[float, int, Sample]]] = field(default_factory=lambda: defaultdict(list))

    def take(self, sample: Sample, chance: float) -> None:
        self.calls, self.tokens = self.calls + 1, self.tokens + len(sample.done.ids)
        kept = self.samples[len(set(sample.done.versions)) > 1]
        kept.append((chance, self.calls, sample))
        kept.sort()
        del kept[SAMPLES:]


class Storm:
    """Events over calls that never pause."""

    def __init__(self, here: World, trainer: Trainer, luck: BadLuck) -> None:
        self.here, self.trainer, self.luck = here, trainer, luck
        self.books, self.over = Books(), asyncio.Event()
        self.draw = random.Random(SEED)
        self.open: set[asyncio.Task[None]] = set()
        self.failed = asyncio.get_running_loop().create_future()

    async def agent(self, number: int) -> None:
        """One call after the other, each with its seed."""
        for turn in count():
            if self.over.is_set():
                return
            name = f"call-{number}.{turn}"
            draw = random.Random(f"{SEED} {name}")
            prompt, tokens = [draw.randrange(250) for _ in range(draw.randint(4, 60))], draw.randint(20, 160)
            fields = {"seed": draw.randrange(1 << 31), "stream_interval": draw.choice((1, 1, 2, 8))}
            fields |= {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
            done = await self.here.plane.generate.remote(name, prompt, fields)
            assert (done.finish, len(done.ids), len(done.logprobs), len(done.versions)) == ("length", *3 * [tokens])
            assert max(done.versions) <= self.trainer.version, "a version nobody committed"
            self.books.take(Sample(prompt, done), draw.random())

    async def events(self) -> None:
        """So many, each once the ones before it are over or, as often, beside up to three of them."""
        for number in range(EVENTS):
            kind = self.kind(EVENTS - number)
            self.books.events[kind] += 1
            self.books.overlapping += bool(self.open)
            self.open.add(asyncio.create_task(self.event(number, kind), name=f"{number} {kind}"))
            await asyncio.sleep(0)  # it begins, and is in the books
            await self.left(self.draw.choice((0, 0, 0, 1, 2, 3)))

    def kind(self, left: int) -> str:
        """By its weight, of those that are possible now; towards the end, one that has not come yet."""
        possible = self.trainer.possible() | self.luck.possible()
        kinds = [kind for kind in KINDS if possible[kind]]
        missing = [kind for kind in kinds if not self.books.events[kind]]
        if missing and left <= 3 * len(KINDS):
            kinds = missing
        return self.draw.choices(kinds, [KINDS[kind] for kind in kinds])[0]

    async def left(self, most: int) -> None:
        """Returns when no more than so many events are open."""
        while len(self.open) > most:
            done, self.open = await asyncio.wait(self.open, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()

    async def event(self, number: int, kind: str) -> None:
        happens = getattr(self.trainer, kind, None) or getattr(self.luck, kind)
        async with self.within(EVENT_S, f"event {number}, {kind}"):
            began = time.monotonic()
            await happens(random.Random(f"{SEED} {number}"))
        await self.goes_on(f"after event {number}, {kind}", began if kind == "kill_plane" else None)

    async def goes_on(self, when: str, began: float | None = None) -> dict[str, str]:
        """Books and servers agree, and every call goes on; the states."""
        for revival in self.here.revivals:
            if revival.done():
                revival.result()
        async with self.within(MOVE_S, when):
            states, longest = await self.here.plane.looked_at.remote()
            await self.here.plane.all_move.remote()
            waited = 0.0 if began is None else time.monotonic() - began  # what no plane has lived to tell
            self.books.longest = max(self.books.longest, longest, waited)
            return dict(states)

    @asynccontextmanager
    async def within(self, seconds: float, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(seconds) as timer:
                yield
        except TimeoutError as late:
            if not timer.expired():
                raise
            raise AssertionError(f"{what} (seed {SEED}): not over in {seconds:g} s\n{await self.where()}") from late
        except BaseException as error:
            error.add_note(f"{what} (seed {SEED})")
            raise

    async def where(self) -> str:
        events = ", ".join(sorted(task.get_name() for task in self.open if not task.done()))
        try:
            async with asyncio.timeout(10):
                stands = await self.here.plane.where.remote()
        except TimeoutError:
            stands = "the plane does not answer"
        return f"open: {events}\n{stands}"

    async def calm(self) -> None:
        """The storm ends: everything is given back, and everyone serves."""
        await self.left(0)
        async with self.within(END_S, "the end"):
            await asyncio.gather(*self.here.revivals)
            trainer = self.trainer
            await trainer.plane.thaw.remote(NAMES)
            await trainer.plane.returned.remote(NAMES)
            await trainer.refitted(NAMES)
        assert await self.goes_on("at the end") == dict.fromkeys(NAMES, SERVING)
        self.over.set()

    async def run(self) -> Books:
        agents = [asyncio.create_task(self.agent(number), name=f"agent {number}") for number in range(CALLS)]
        events = asyncio.create_task(self.stormed())
        async with self.within(EVENTS * EVENT_S, "all events"):
            await first_failure(events, *agents)
        metrics = await self.here.plane.settle.remote()
        assert metrics["calls/running"] == metrics["fleet/attached"] == metrics["fleet/waiting"] == 0
        assert metrics["fleet/serving"] == len(NAMES)
        left = await asyncio.gather(*(server.left.remote() for server in self.here.servers.values()))
        assert left == [(0, 0)] * len(NAMES), f"requests that nobody waits for: {left}"
        return self.books

    async def stormed(self) -> None:
        await self.events()
        await self.calm()


async def first_failure(*tasks: asyncio.Task[None]) -> None:
    """Returns when all are over; one that fails ends the others."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def largest_error(samples: Sequence[Sample], weights: Weights, shift: int = 0) -> float:
    """Of every token's logprob against transformers under its version's weights, or those `shift` versions later."""
    worst = 0.0
    for version in sorted({version for sample in samples for version in sample.done.versions}):
        model = weights.model(version + shift)
        for sample in samples:
            worst = max(worst, error_under(model, sample, version))
    return worst


def error_under(model: Any, sample: Sample, version: int) -> float:
    chosen = torch.tensor(sample.done.versions) == version
    if not chosen.any():
        return 0.0
    ids = torch.tensor(sample.prompt + sample.done.ids)
    with torch.no_grad():
        rows = model(ids[None]).logits[0, len(sample.prompt) - 1 : -1].log_softmax(-1)
    found = rows.gather(1, ids[len(sample.prompt) :, None])[:, 0]
    return float((found - torch.tensor(sample.done.logprobs)).abs()[chosen].max())


@pytest.mark.timeout(3600)
def test_no_row_of_events_stops_a_call_or_loses_a_token(nano: Path) -> None:
    sys.stdout.write(f"\nSEAMLESS_EVENTS={EVENTS} SEAMLESS_SEED={SEED}\n")

    async def scenario() -> tuple[Books, float, int]:
        async with world(nano / "model") as (here, trainer, luck):
            began = time.monotonic()
            books = await Storm(here, trainer, luck).run()
            return books, time.monotonic() - began, trainer.version

    with cluster():
        books, seconds, version = asyncio.run(scenario())
    assert books.events.total() == EVENTS and books.calls > CALLS
    samples = [sample for kept in books.samples.values() for _, _, sample in kept]
    error, weights = largest_error(samples, Weights(nano / "model")), Weights(nano / "model")
    sys.stdout.write(
        f"{EVENTS} events in {seconds:.0f} s, {books.overlapping} of them beside others: {dict(books.events)}\n"
        f"{books.calls} calls, {books.tokens} tokens of {version + 1} versions, longest wait of a call "
        f"{books.longest:.1f} s; logprob error of {len(samples)} calls {error:.1e}\n"
    )
    assert error < 1e-3
    assert largest_error(samples[:20], weights, shift=1) > 0.1, "wrong weights would not have been told apart"
    assert len(books.samples[True]) >= min(SAMPLES, EVENTS // 4), "too few calls had several versions"
