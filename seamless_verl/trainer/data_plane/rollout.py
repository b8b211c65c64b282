"""The rollout manager: the fleet of the job's replicas, the calls that run on it, and its weight version.

It lives in the data plane's actor. The trainer commands it: which replicas stand still, which are being
given new weights, which version is committed. Whoever wants tokens calls `generate`, or comes through the
gateway; either way the call is carried over every pause, hand-over and death.

The actor may die at any instant. Ray starts it again and repeats what it had not answered: every method may be
called again, and what must be known for that is on a shelf outside of the actor before a command is answered.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import Collection
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import ray

from seamless_verl.errors import ReplicaLostError
from seamless_verl.rollout.calls import Call, Calls
from seamless_verl.rollout.commands import Commands
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.notes import Notes
from seamless_verl.rollout.routing import PrefixAffinity, ReplicaView
from seamless_verl.rollout.states import DEAD, PAUSED, SERVING, ReplicaState
from seamless_verl.runtime.stacks import stacks
from seamless_verl.trainer.data_plane.bell import Bell, Failures
from seamless_verl.trainer.data_plane.contact import Attachment, Contact
from seamless_verl.trainer.data_plane.shelf import Shelf
from seamless_verl.trajectory.records import Finish

REPORT_TOKENS = 64  # an engine tells of so many tokens at a time where nobody reads along
STATES = {f"fleet/{state}" for state in ReplicaState}  # the same in every plane


@dataclass(frozen=True)
class RolloutSettings:
    """`capacity` calls at once on one replica; `token` opens the replicas' doors.

    One that does not stop or start within `transition_s` is given up. With `grammars_resume` their engines take up a
    grammar where a call was cut. `others` are the names of the planes that share the replicas with the first one; a
    `mirror` is one of those.
    """

    name: str
    token: str
    capacity: int = 256
    others: tuple[str, ...] = ()
    mirror: bool = False
    max_failed_groups: int = 32
    transition_s: float | None = None
    grammars_resume: bool = True


@dataclass
class Generated:
    """A whole generation: ids [N], logprobs [N] in nats, the weight version of each token [N], and why it ended."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""


class RolloutManager(ABC):
    """Owns the fleet and its calls. Replicas are named `replica-<rank>`."""

    def __init__(self, settings: RolloutSettings, shelf: Shelf | None = None) -> None:
        self.rollout = settings
        self.fleet = Fleet(policy=PrefixAffinity(), deadline_s=settings.transition_s, on_change=self._changed)
        self.calls = Calls(self.fleet, grammars_resume=settings.grammars_resume)
        self.bell, self.failures = Bell(), Failures(settings.max_failed_groups)
        self.shelf = shelf or Shelf(settings.name)
        self.contact: Contact
        self.commands: Commands
        self.mending: asyncio.Task[None] | None = None
        self.stopping = False

    @abstractmethod
    async def up(self) -> None:
        """Returns when it goes on where it was left; raises what keeps it from that."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """It cannot go on: whoever waits or asks is told so."""

    def go_on(self) -> bool:
        """With what an earlier life left on the shelf, if there was one."""
        left: tuple[Notes, dict[str, Attachment]] | None = self.shelf.get()
        notes, attachments = left or (Notes(), {})
        self.fleet.commit(notes.committed)
        rollout = self.rollout
        self.contact = Contact(
            self.fleet, notes, attachments, token=rollout.token, capacity=rollout.capacity, mirror=rollout.mirror
        )
        self.commands = Commands(
            self.fleet,
            notes,
            save=lambda: self.shelf.put((notes, self.contact.attachments)),
            mend=self.contact.seek,
            tell=self._tell,
        )
        self._mend()
        return left is not None

    async def attach(self, replica_id: str, host: str, port: int, server: Any) -> None:
        """A replica that listens; it serves after the next commit."""
        await self.up()
        async with self.commands.told():
            await self.contact.attach(Attachment(replica_id, host, port, server))
            await self._tell("attach", replica_id, host, port, server)

    async def generate(self, name: str, prompt_ids: list[int], sampling: dict[str, Any]) -> Generated:
        """One call to its end. `sampling` are vLLM's fields; calls of one `name` like to be together.

        Raises:
            CallError: the call failed for good.
        """
        await self.up()
        call = Call(name, array("i", prompt_ids), {"stream_interval": REPORT_TOKENS, **sampling}, key=name)
        done = Generated()
        async with aclosing(self.calls.stream(call)) as pieces:
            async for piece in pieces:
                done.ids.extend(piece.ids)
                done.logprobs.extend(piece.logprobs)
                done.versions.extend([piece.version] * len(piece.ids))
                if piece.error is not None:
                    raise piece.error
                done.finish = piece.finish or Finish.FAILED
        return done

    async def freeze(self, ids: Collection[str]) -> dict[str, int]:
        """See `Commands` for this and the commands that follow. How many calls each of them has."""
        await self.up()
        await self.commands.freeze(ids)
        return self._calls(ids)

    async def thaw(self, ids: Collection[str]) -> list[str]:
        await self.up()
        return await self.commands.thaw(ids)

    async def stand_still(self, ids: Collection[str]) -> None:
        await self.up()
        await self.commands.stand_still(ids)

    async def part(self, ids: Collection[str], order: int = 0) -> dict[str, int]:
        """Those that parted, with how many calls each had."""
        await self.up()
        calls = self._calls(ids)
        return {name: calls.get(name, 0) for name in await self.commands.part(ids, order)}

    async def returned(self, ids: Collection[str]) -> list[str]:
        await self.up()
        return await self.commands.returned(ids)

    async def commit(self, version: int) -> None:
        await self.up()
        await self.commands.commit(version)

    async def refit(self, ids: Collection[str], version: int, weights: Any) -> list[str]:
        await self.up()
        return await self.commands.refit(ids, version, weights)

    async def begin_sync(self, ids: Collection[str]) -> list[str]:
        await self.up()
        return await self.commands.begin_sync(ids)

    async def synced(self, ids: Collection[str], version: int) -> list[str]:
        await self.up()
        return await self.commands.synced(ids, version)

    async def sync_failed(self, ids: Collection[str], reason: str = "") -> list[str]:
        await self.up()
        return await self.commands.sync_failed(ids, reason)

    async def settle(self) -> dict[str, float]:
        """Metrics of all planes, after the books have been found to close and somebody to serve.

        Raises:
            IntegrityError: they do not close.
            ReplicaLostError: no replica serves, so that every call would wait for ever.
        """
        await self.up()
        async with self.commands.told():
            self.check_integrity()
            frozen = self.commands.of(self.commands.notes.held, PAUSED)  # while training has their device
            if not frozen and not self.commands.of(self.fleet, SERVING):
                raise ReplicaLostError(", ".join(self.fleet), f"no replica serves version {self.fleet.committed}")
            return summed([await self.metrics(), *await self._tell("settle")])

    def check_integrity(self) -> None:
        """Raises IntegrityError where the books of fleet and calls do not close."""
        self.fleet.check_integrity()
        self.calls.check_integrity()

    async def metrics(self) -> dict[str, float]:
        return self.fleet.metrics() | self.calls.metrics()

    async def ring(self, failure: str | None = None) -> None:
        """A group of sessions has come to its end; `failure` is why, if it failed."""
        self.failures.note(failure)
        self.bell.ring()

    async def rung(self, heard: int, timeout: float) -> int:
        """How often it was rung, as soon as that is not `heard` or `timeout` seconds have passed.

        Raises:
            GroupsFailedError: too many groups failed one after another.
        """
        await self.up()
        count = await self.bell.wait(heard, timeout)
        await self.up()
        self.failures.check()
        return count

    async def moved(self) -> float:
        """Tokens and replies so far: it grows as long as anything goes on here."""
        return sum(self.calls.metrics().values())

    async def where(self) -> str:
        """What stands where, for a person: replicas, calls, and every task of this process."""
        books = [
            *map(str, self.fleet.view),
            str({**self.calls.metrics(), "training has": sorted(self.commands.notes.held)}),
        ]
        return "\n".join([*books, stacks(asyncio.get_running_loop())])

    async def stop(self) -> None:
        """End what runs."""
        self.stopping = True
        for replica_id in list(self.fleet):
            await self.fleet.remove(replica_id)
        self.shelf.clear()

    def _changed(self, view: ReplicaView, why: str) -> None:
        if view.state is DEAD and why != "restored" and not self.stopping:
            if not self.fleet.given_up(view.replica_id):
                self.contact.lost.add(view.replica_id)
            self._mend()

    def _calls(self, ids: Collection[str]) -> dict[str, int]:
        return {view.replica_id: view.load for view in self.fleet.view if view.replica_id in ids}

    def _mend(self) -> None:
        """See to what was lost also while nobody commands anything."""
        if self.mending is None or self.mending.done():
            self.mending = asyncio.create_task(self._mended(), name="mending")
            self.mending.add_done_callback(self._mending_ended)

    async def _mended(self) -> None:
        while self.contact.missing and not self.stopping:
            async with self.commands.told():
                pass
        states = {view.state for view in self.fleet.view}
        if states == {DEAD} and not self.stopping:
            raise ReplicaLostError(", ".join(self.fleet), "none is left, and every call would wait for ever")

    def _mending_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _tell(self, command: str, *arguments: Any) -> list[Any]:
        """The same to the other planes, if there are any; their answers."""
        others = [ray.get_actor(name) for name in self.rollout.others]
        return list(await asyncio.gather(*(getattr(other, command).remote(*arguments) for other in others)))


def summed(metrics: list[dict[str, float]]) -> dict[str, float]:
    """The planes' metrics as one's: counts add up, the replicas' states are the first plane's."""
    total = Counter(metrics[0])
    for more in metrics[1:]:
        total.update({name: value for name, value in more.items() if name not in STATES})
    return dict(total)
