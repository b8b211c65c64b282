"""A row of random events, several at a time, over calls that never pause; after each, all must go on."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from seamless_verl.data_plane.actor import Generated
from seamless_verl.rollout.replica_state import SERVING
from support.events_cases import KINDS, BadLuck, Trainer
from support.events_world import NAMES, World

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
    seconds: float = 0.0
    versions: int = 0
    samples: dict[bool, list[tuple[float, int, Sample]]] = field(default_factory=lambda: defaultdict(list))

    def take(self, sample: Sample, chance: float) -> None:
        self.calls, self.tokens = self.calls + 1, self.tokens + len(sample.done.ids)
        kept = self.samples[len(set(sample.done.versions)) > 1]
        kept.append((chance, self.calls, sample))
        kept.sort()
        del kept[SAMPLES:]


class Storm:
    """Events over calls that never pause."""

    def __init__(self, here: World, *, number: int, seed: int) -> None:
        self.here, self.number, self.seed = here, number, seed
        self.trainer = Trainer(here)
        self.luck = BadLuck(here, self.trainer)
        self.books, self.over = Books(), asyncio.Event()
        self.draw = random.Random(self.seed)
        self.open: set[asyncio.Task[None]] = set()

    async def agent(self, number: int) -> None:
        """One call after the other, each with its seed."""
        for turn in count():
            if self.over.is_set():
                return
            name = f"call-{number}.{turn}"
            draw = random.Random(f"{self.seed} {name}")
            prompt, tokens = [draw.randrange(250) for _ in range(draw.randint(4, 60))], draw.randint(20, 160)
            fields = {"seed": draw.randrange(1 << 31), "stream_interval": draw.choice((1, 1, 2, 8))}
            fields |= {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
            done = await self.here.plane.generate.remote(name, prompt, fields)
            assert (done.finish, len(done.ids), len(done.logprobs), len(done.versions)) == ("length", *3 * [tokens])
            assert max(done.versions) <= self.trainer.version, "a version nobody committed"
            self.books.take(Sample(prompt, done), draw.random())

    async def events(self) -> None:
        """So many, each once the ones before it are over or, as often, beside up to three of them."""
        for number in range(self.number):
            kind = self.kind(self.number - number)
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
            await happens(random.Random(f"{self.seed} {number}"))
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
            raise AssertionError(
                f"{what} (seed {self.seed}): not over in {seconds:g} s\n{await self.where()}"
            ) from late
        except BaseException as error:
            error.add_note(f"{what} (seed {self.seed})")
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
            await trainer.refitted(NAMES, random.Random(0))
        assert await self.goes_on("at the end") == dict.fromkeys(NAMES, SERVING)
        self.over.set()

    async def run(self) -> Books:
        """Raises AssertionError, IntegrityError or what else an event met, with its number and the seed."""
        await self.trainer.refitted(NAMES, random.Random(0))
        began = time.monotonic()
        agents = [asyncio.create_task(self.agent(number), name=f"agent {number}") for number in range(CALLS)]
        events = asyncio.create_task(self.stormed())
        async with self.within(self.number * EVENT_S, "all events"):
            await first_failure(events, *agents)
        metrics = await self.here.plane.settle.remote()
        assert metrics["calls/running"] == metrics["fleet/attached"] == metrics["fleet/waiting"] == 0
        assert metrics["fleet/serving"] == len(NAMES)
        left = await asyncio.gather(*(server.left.remote() for server in self.here.servers.values()))
        assert left == [(0, 0)] * len(NAMES), f"requests that nobody waits for: {left}"
        self.books.seconds, self.books.versions = time.monotonic() - began, self.trainer.version + 1
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
