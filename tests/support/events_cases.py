"""The kinds of events that happen to a live run.

A kind of event is a method of `Trainer` or `BadLuck` whose name stands in `KINDS`, with how often it comes. It takes
`draw`, its own randomness, and returns when it has happened; what else it takes place beside is up to the schedule.
Each class says under `possible` which of its kinds make sense now, so that the books stay those of one trainer:
commands about the same thing, a freeze and a thaw of one replica, say, follow each other, all others may overlap.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import psutil
import ray

from seamless_verl.rollout.replica import DEAD
from support.events_world import NAMES, World

BY_ITSELF = float(os.environ.get("SEAMLESS_BY_ITSELF", "0.7"))  # share of loads that are one command
KINDS = {
    "pause_for_training": 8.0,
    "resume": 8.0,
    "pause": 6.0,
    "release_memory": 5.0,
    "reclaim_memory": 6.0,
    "update": 6.0,
    "update_that_fails": 1.5,
    "update_weights": 2.0,
    "hang_up": 1.5,
    "die": 1.2,
    "kill_plane": 0.8,
}


class Trainer:
    """Commands, as a trainer gives them; `version` is what it committed."""

    def __init__(self, world: World) -> None:
        self.world, self.plane = world, world.plane
        self.version = 0
        self.training, self.away, self.busy = set[str](), set[str](), set[str]()
        self.updating, self.orders = asyncio.Lock(), itertools.count(1)
        self.moving = False

    def possible(self) -> dict[str, bool]:
        return {
            "pause_for_training": bool(self.free()),
            "resume": bool(self.training - self.busy),
            "pause": bool(self.free()),
            "release_memory": not self.moving and len(self.away) < len(NAMES),
            "reclaim_memory": not self.moving and bool(self.away),
            "update": not self.updating.locked(),
            "update_that_fails": not self.updating.locked(),
            "update_weights": not self.updating.locked(),
        }

    def free(self) -> list[str]:
        return [name for name in NAMES if name not in self.training | self.busy]

    async def pause_for_training(self, draw: random.Random) -> None:
        """Training takes devices whose replicas stay where they are."""
        with self.busy_with(some(draw, self.free())) as names:
            await self.plane.execute.remote("pause", names)
            self.training |= set(names)

    async def resume(self, draw: random.Random) -> None:
        with self.busy_with(some(draw, self.training - self.busy)) as names:
            await self.plane.execute.remote("resume", names)
            self.training -= set(names)

    async def pause(self, draw: random.Random) -> None:
        """As long as a computation may take."""
        with self.busy_with(some(draw, self.free())) as names:
            await self.plane.execute.remote("pause", names)
            await asyncio.sleep(draw.uniform(0, 0.1))
            await self.plane.execute.remote("resume", names)

    async def release_memory(self, draw: random.Random) -> None:
        """Training takes devices and their memory: calls are cut, and what they had is put away."""
        with self.hand_over():
            names = some(draw, set(NAMES) - self.away)
            released = set(await self.plane.execute.remote("release_memory", names, next(self.orders)))
            for name in sorted(released):
                await self.put_away(name, draw)
            self.away |= released

    async def put_away(self, name: str, draw: random.Random) -> None:
        """Its cache, and with it its weights or not."""
        server = self.world.servers[name]
        with suppress(ray.exceptions.RayActorError):  # it is dead
            await (server.sleep if draw.random() < 0.5 else server.put_cache_away).remote()

    async def reclaim_memory(self, draw: random.Random) -> None:
        with self.hand_over():
            names = some(draw, self.away)
            await self.plane.execute.remote("reclaim_memory", names)
            self.away -= set(names)
        await self.load_all(names, draw)

    async def update(self, draw: random.Random) -> None:
        """One replica after the other."""
        await self.updated(shuffled(draw), draw, failing=())

    async def update_that_fails(self, draw: random.Random) -> None:
        """On its way to one of them."""
        await self.updated(names := shuffled(draw), draw, failing=names[:1])

    async def update_weights(self, draw: random.Random) -> None:
        """Of whoever needs it, and of some who do not."""
        await self.load_all(some(draw, NAMES), draw)

    async def updated(self, names: list[str], draw: random.Random, failing: Collection[str]) -> None:
        async with self.updating:
            self.version += 1
            await self.plane.execute.remote("commit", self.version)
            for name in names:
                await self.load(name, draw, fails=name in failing)

    async def load_all(self, names: Collection[str], draw: random.Random) -> None:
        async with self.updating:
            for name in names:
                await self.load(name, draw)

    async def load(self, name: str, draw: random.Random, *, fails: bool = False) -> None:
        """As WeightCommit does it, in either way: nothing, where it is away or dead."""
        if draw.random() >= BY_ITSELF:
            await self.load_from_outside(name, fails)
            return
        with suppress(ray.exceptions.RayActorError):  # it is dead
            staged = await self.world.servers[name].stage.remote(self.version, gone=fails)
            await self.plane.execute.remote("update_weights", [name], self.version, [staged])

    async def load_from_outside(self, name: str, fails: bool) -> None:
        for standing in await self.plane.execute.remote("begin_sync", [name]):
            server = self.world.servers[standing]
            try:
                await (server.spoil if fails else server.load).remote(self.version)
            except (ray.exceptions.RayActorError, ConnectionError) as error:
                await self.plane.execute.remote("fail_sync", [name], str(error))
            else:
                await self.plane.execute.remote("end_sync", [name], self.version)

    @contextmanager
    def busy_with(self, names: list[str]) -> Iterator[list[str]]:
        self.busy |= set(names)
        yield names
        self.busy -= set(names)

    @contextmanager
    def hand_over(self) -> Iterator[None]:
        self.moving = True
        yield
        self.moving = False


class BadLuck:
    """What happens to processes and connections."""

    def __init__(self, world: World, trainer: Trainer) -> None:
        self.world, self.trainer = world, trainer
        self.killing = False

    def possible(self) -> dict[str, bool]:
        return {
            "hang_up": True,
            "die": len(self.world.down) < len(NAMES) - 1,
            "kill_plane": not self.killing,
        }

    async def hang_up(self, draw: random.Random) -> None:
        """A connection breaks while both its ends live."""
        with suppress(ray.exceptions.RayActorError):  # it is dead
            await self.world.servers[draw.choice(NAMES)].hang_up.remote()

    async def die(self, draw: random.Random) -> None:
        """Kill -9 of a replica's engine, its worker or all of it; it is started again, beside what comes next."""
        world = self.world
        name = draw.choice([name for name in NAMES if name not in world.down])
        world.down.add(name)
        processes, what = world.processes[name], draw.choice(("engine", "worker", "machine"))
        await world.kill(*(processes.values() if what == "machine" else [processes[what]]))
        while (await world.plane.looked_at.remote())[0][name] != DEAD:
            pass
        world.revivals.add(asyncio.create_task(self.revive(name)))

    async def revive(self, name: str) -> None:
        await self.world.kill(*self.world.processes[name].values())
        await self.world.start(name)
        self.world.down.remove(name)
        await self.trainer.load_all([name], random.Random(0))

    async def kill_plane(self, draw: random.Random) -> None:
        """Ray starts it again and repeats what it had not answered."""
        self.killing = True
        pid = await self.world.plane.__ray_call__.remote(lambda plane: os.getpid())
        await self.world.kill(psutil.Process(pid))
        await self.world.plane.start.remote()
        self.killing = False


def some(draw: random.Random, names: Collection[str]) -> list[str]:
    return draw.sample(sorted(names), draw.randint(1, len(names)))


def shuffled(draw: random.Random) -> list[str]:
    return draw.sample(NAMES, len(NAMES))
