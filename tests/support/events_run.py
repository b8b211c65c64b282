"""Random events, several at a time, over calls that never pause; after each event every call must make progress.

Half of the calls are samples of groups under a sampler, which reopens and drops groups as it does in a run.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

from seamless_verl.data_plane.settings import Generated
from seamless_verl.rollout.replica import SERVING
from support.events_cases import KINDS, BadLuck, Trainer
from support.events_groups import FIRST, PROMPTS, SampledGroups
from support.events_world import NAMES, World

CALLS, SAMPLES = 32, 150
MOVE_S, EVENT_S, END_S = 30.0, 60.0, 120.0  # for all calls to go on after an event, for an event, for the end


@dataclass
class Sample:
    """A call that has ended."""

    prompt: list[int]
    done: Generated


@dataclass
class RunSummary:
    """Results of a run; `samples` are drawn from all calls, as many with several versions as with one."""

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


class ChaosRun:
    """Events over calls that never pause."""

    def __init__(self, world: World, *, number: int, seed: int) -> None:
        self.world, self.number, self.seed = world, number, seed
        self.trainer = Trainer(world)
        self.luck = BadLuck(world, self.trainer)
        self.summary, self.over = RunSummary(), asyncio.Event()
        self.draw = random.Random(self.seed)
        self.open: set[asyncio.Task[None]] = set()
        self.groups = SampledGroups(self.call, seed)

    async def agent(self, number: int) -> None:
        """One call after the other, each with its seed."""
        for turn in count():
            if self.over.is_set():
                return
            await self.call(f"call-{number}.{turn}")

    async def call(self, name: str) -> int:
        """One call to its end; returns how many tokens it has."""
        draw = random.Random(f"{self.seed} {name}")
        prompt, tokens = [draw.randrange(250) for _ in range(draw.randint(4, 60))], draw.randint(20, 160)
        fields = {"seed": draw.randrange(1 << 31), "stream_interval": draw.choice((1, 1, 2, 8))}
        fields |= {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
        done = await self.world.plane.generate.remote(name, prompt, fields)
        assert (done.finish, len(done.ids), len(done.logprobs), len(done.versions)) == ("length", *3 * [tokens])
        assert max(done.versions) <= self.trainer.version, "a version nobody committed"
        self.summary.take(Sample(prompt, done), draw.random())
        return tokens

    async def events(self) -> None:
        """So many, each once the ones before it are over or, as often, beside up to three of them."""
        for number in range(self.number):
            kind = self.kind(self.number - number)
            self.summary.events[kind] += 1
            self.summary.overlapping += bool(self.open)
            self.open.add(asyncio.create_task(self.event(number, kind), name=f"{number} {kind}"))
            await asyncio.sleep(0)  # it begins, and is counted
            await self.wait_until_open(self.draw.choice((0, 0, 0, 1, 2, 3)))

    def kind(self, left: int) -> str:
        """By its weight, of those that are possible now; towards the end, one that has not come yet."""
        possible = self.trainer.possible() | self.luck.possible()
        kinds = [kind for kind in KINDS if possible[kind]]
        missing = [kind for kind in kinds if not self.summary.events[kind]]
        if missing and left <= 3 * len(KINDS):
            kinds = missing
        return self.draw.choices(kinds, [KINDS[kind] for kind in kinds])[0]

    async def wait_until_open(self, most: int) -> None:
        """Returns when no more than so many events are open."""
        while len(self.open) > most:
            done, self.open = await asyncio.wait(self.open, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def event(self, number: int, kind: str) -> None:
        happens = getattr(self.trainer, kind, None) or getattr(self.luck, kind)
        async with self.within(EVENT_S, f"event {number}, {kind}"):
            began = time.monotonic()
            await happens(random.Random(f"{self.seed} {number}"))
        await self.check_progress(f"after event {number}, {kind}", began if kind == "kill_plane" else None)

    async def check_progress(self, when: str, began: float | None = None) -> dict[str, str]:
        """Assert that plane and servers agree and that every call makes progress; returns the replicas' states."""
        for revival in self.world.revivals:
            if revival.done():
                revival.result()
        async with self.within(MOVE_S, when):
            states, longest = await self.world.plane.looked_at.remote()
            await self.world.plane.all_move.remote()
            waited = (
                0.0 if began is None else time.monotonic() - began
            )  # which a plane that was killed could not measure
            self.summary.longest = max(self.summary.longest, longest, waited)
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
                f"{what} (seed {self.seed}): not over in {seconds:g} s\n{await self.report()}"
            ) from late
        except BaseException as error:
            error.add_note(f"{what} (seed {self.seed})")
            raise

    async def report(self) -> str:
        events = ", ".join(sorted(task.get_name() for task in self.open if not task.done()))
        try:
            async with asyncio.timeout(10):
                stands = await self.world.plane.stack_report.remote()
        except TimeoutError:
            stands = "the plane does not answer"
        return f"open: {events}\n{stands}"

    async def restore_all(self) -> None:
        """End all events, give everything back and assert that every replica serves."""
        await self.wait_until_open(0)
        async with self.within(END_S, "the end"):
            await asyncio.gather(*self.world.revivals)
            trainer = self.trainer
            await trainer.plane.execute.remote("resume", NAMES)
            await trainer.plane.execute.remote("reclaim_memory", NAMES)
            await trainer.load_all(NAMES, random.Random(0))
        assert await self.check_progress("at the end") == dict.fromkeys(NAMES, SERVING)
        self.over.set()

    async def run(self) -> RunSummary:
        """Raises AssertionError, IntegrityError or what else an event met, with its number and the seed."""
        await self.trainer.load_all(NAMES, random.Random(0))
        began = time.monotonic()
        alone, prompts = range(CALLS - PROMPTS * FIRST), range(PROMPTS)
        agents = [asyncio.create_task(self.agent(number), name=f"agent {number}") for number in alone]
        agents += [asyncio.create_task(self.groups.prompt(n, self.over), name=f"prompt {n}") for n in prompts]
        events = asyncio.create_task(self.run_events())
        async with self.within(self.number * EVENT_S, "all events"):
            await first_failure(events, *agents)
        metrics = await self.world.plane.checked_metrics.remote()
        assert metrics["calls/running"] == metrics["fleet/attached"] == metrics["fleet/waiting"] == 0
        assert metrics["fleet/serving"] == len(NAMES)
        left = await asyncio.gather(*(server.left.remote() for server in self.world.servers.values()))
        assert left == [(0, 0)] * len(NAMES), f"requests that nobody waits for: {left}"
        self.summary.seconds, self.summary.versions = time.monotonic() - began, self.trainer.version + 1
        return self.summary

    async def run_events(self) -> None:
        await self.events()
        await self.restore_all()


async def first_failure(*tasks: asyncio.Task[None]) -> None:
    """Returns when all are over; one that fails ends the others."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
