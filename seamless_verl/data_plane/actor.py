"""The rollout manager: the fleet of the job's replicas, the calls that run on it, and its weight version.

It lives in the data plane's actor. The trainer commands it: which replicas stand still, which are being
given new weights, which version is committed. Whoever wants tokens calls `generate`, or comes through the
gateway; either way the call is carried over every pause, hand-over and death.

The actor may die at any instant. Ray starts it again and repeats what it had not answered: every method may be
called again, and what must be known for that is on a shelf outside of the actor before a command is answered.

The actor between agents and replicas: the rollout manager, and with a gateway also its sessions and journal.

Owned state: all of these; the trainer commands it, agent loops generate and open and close sessions in it.

States: (made) STARTING -> UP -> FAILED. After a death Ray makes it again; it starts without being asked, since
agents ask nobody. What FAILED says why, to everybody who asks from then on, and is not started again.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import ray

from seamless_verl.data_plane.connections import ReplicaAddress, ReplicaConnections
from seamless_verl.data_plane.group_notifier import Failures, GroupNotifier
from seamless_verl.data_plane.restart import StateStore
from seamless_verl.data_plane.sessions import FinishedSession, Sessions, SessionSettings
from seamless_verl.errors import JournalError, PlaneFailedError, ReplicaLostError
from seamless_verl.rollout.call import Call, Calls
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.manager import Commands, FleetSnapshot
from seamless_verl.rollout.replica_state import DEAD, PAUSED, SERVING, ReplicaState
from seamless_verl.rollout.routing import PrefixAffinity, ReplicaView
from seamless_verl.runtime.process import freeze_imports, show_log
from seamless_verl.runtime.stacks import stacks
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

    def __init__(self, settings: RolloutSettings, shelf: StateStore | None = None) -> None:
        self.rollout = settings
        self.fleet = Fleet(policy=PrefixAffinity(), deadline_s=settings.transition_s, on_change=self._changed)
        self.calls = Calls(self.fleet, grammars_resume=settings.grammars_resume)
        self.bell, self.failures = GroupNotifier(), Failures(settings.max_failed_groups)
        self.shelf = shelf or StateStore(settings.name)
        self.contact: ReplicaConnections
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
        left: tuple[FleetSnapshot, dict[str, ReplicaAddress]] | None = self.shelf.get()
        notes, attachments = left or (FleetSnapshot(), {})
        self.fleet.commit(notes.committed)
        rollout = self.rollout
        self.contact = ReplicaConnections(
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
            await self.contact.attach(ReplicaAddress(replica_id, host, port, server))
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


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlaneSettings:
    """No `sessions`, no gateway."""

    rollout: RolloutSettings
    sessions: SessionSettings | None = None


class DataPlane(RolloutManager):
    """A plain class, made an actor where it is started."""

    def __init__(self, settings: PlaneSettings) -> None:
        show_log()
        super().__init__(settings.rollout)
        self.settings = settings
        self.sessions: Sessions | None = None
        self.starting: asyncio.Task[None] | None = None
        self.failed: PlaneFailedError | None = None
        ray.get_runtime_context().current_actor.start.remote()  # Ray calls nothing but this after a death

    async def start(self) -> str | None:
        """Listen; returns the gateway's address, without a slash at its end, if there is one."""
        await self.up()
        return None if self.sessions is None else self.sessions.gateway.url

    async def up(self) -> None:
        if self.starting is None:
            self.starting = asyncio.create_task(self._start(), name="start")
        await asyncio.shield(self.starting)
        if self.failed is not None:
            raise self.failed

    async def _start(self) -> None:
        try:
            again = self.go_on()
            if self.settings.sessions is not None:
                self.sessions = Sessions(self.settings.sessions, self.calls, on_failure=self.fail)
                await self.sessions.start(again=again)
            async with self.commands.told():  # from now on this is not its first life
                pass
            freeze_imports()
        except Exception as error:  # whoever asks is told
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """It cannot go on: whoever waits or asks is told so."""
        if self.failed is None:
            self.failed = PlaneFailedError(self.settings.rollout.name, f"{type(error).__name__}: {error}")
            logger.critical("%s", self.failed, exc_info=error)
            self.bell.wake()

    async def stop(self) -> None:
        """End what runs, and make all of it durable."""
        await self.up()
        if self.sessions is not None:
            await self.sessions.stop()
            self.sessions = None
        await super().stop()

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        """A session; `body` as POST /admin/sessions takes it."""
        async with self._journalling() as sessions:
            return await sessions.open(body)

    async def close(self, session_id: str, reason: str) -> FinishedSession:
        """End a session and take what it leaves; again gives the same, until it was handed over."""
        async with self._journalling() as sessions:
            return await sessions.close(session_id, reason, self.fleet.committed)

    async def handed(self, session_id: str, kept: bool = True) -> None:
        """What a closed session left has been taken over, or is left out: it is never given again."""
        async with self._journalling() as sessions:
            await sessions.handed(session_id, kept)

    @asynccontextmanager
    async def _journalling(self) -> AsyncGenerator[Sessions, None]:
        """Without its journal the plane can do nothing."""
        await self.up()
        assert self.sessions is not None
        try:
            yield self.sessions
        except JournalError as error:
            self.fail(error)
            raise

    async def metrics(self) -> dict[str, float]:
        metrics = await super().metrics()
        return metrics if self.sessions is None else metrics | await self.sessions.settle()
