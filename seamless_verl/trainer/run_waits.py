"""The graph of waits of a run, put together from what the trainer, its data planes and its agent loop workers know.

It is asked for only every few seconds. A process that does not reply in time is in the graph itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray

from seamless_verl.config.wait_settings import WatchdogConfig
from seamless_verl.data_plane.waits import PlaneWaits, group_name, server_name
from seamless_verl.runtime.actor_death import ACTOR_GONE
from seamless_verl.runtime.waits import QUEUE, TRAINER, Blocked, Limits, Wait, WaitKind, merge

REPLY_S = 5.0
SILENT_S = 10.0  # an actor that owes a reply for longer is in the graph
FIRST_PLANE = "data plane"
FOR_GROUPS = ("waiting for groups", "validating")
"""The first words of the stages in which the trainer waits for groups."""


KEY = "seamless.watchdog"
SETTINGS = {
    WaitKind.GROUP: f"{KEY}.group_s",
    WaitKind.CALL: f"2 x {KEY}.transition_s",
    WaitKind.REPLICA: f"2 x {KEY}.transition_s",
    WaitKind.SERVER: f"{KEY}.transition_s",
    WaitKind.QUEUE: f"2 x {KEY}.transition_s",
    WaitKind.COMMIT: f"half of {KEY}.no_progress_s",
    WaitKind.ACTOR: f"half of {KEY}.no_progress_s",
}
"""From which setting each limit follows."""


def limits_of(watchdog: WatchdogConfig) -> Limits:
    """The limit of each kind; the replicas' servers have one in the data plane, too."""
    return {
        WaitKind.GROUP: watchdog.group_s,
        WaitKind.CALL: watchdog.silent_s,
        WaitKind.REPLICA: watchdog.silent_s,
        WaitKind.SERVER: float(watchdog.transition_s),
        WaitKind.QUEUE: watchdog.silent_s,
        WaitKind.COMMIT: watchdog.long_s,
        WaitKind.ACTOR: watchdog.long_s,
    }


@dataclass(frozen=True)
class RunParts:
    """What is asked; each gives what there is at the moment.

    `stage`: the trainer's, and for how many seconds it has been in it. `planes` and `workers`: data planes and agent
    loop workers by name, without the workers of a user's own manager. `silent_s`: for how many seconds actors have not
    replied, by name, of which `training` are the trainer's workers. `commit`: the version that is being committed, and
    for how many seconds. `outstanding`: the uids of the prompts whose groups the trainer has not taken.
    """

    stage: Callable[[], tuple[str, float]]
    planes: Callable[[], Mapping[str, Any]]
    workers: Callable[[], Mapping[str, Any]]
    silent_s: Callable[[], Mapping[str, float]]
    training: Callable[[], Iterable[str]]
    commit: Callable[[], tuple[int, float] | None]
    outstanding: Callable[[], Iterable[str]]


class RunWaits:
    """Collects the waits of a run. Owned state: the questions without a reply, one for each process at most, with the
    time on the monotonic clock; and the worker of each group."""

    def __init__(self, parts: RunParts) -> None:
        self.parts = parts
        self.asked: dict[str, tuple[Any, float]] = {}
        self.hosts: dict[str, str] = {}

    def collect(self) -> list[Wait]:
        """The nodes now; takes `REPLY_S` seconds at most."""
        planes, workers = self.parts.planes(), self.parts.workers()
        replies = self._ask(planes | workers)
        silent = {name: seconds for name, seconds in self.parts.silent_s().items() if seconds > SILENT_S}
        silent |= self._silent()
        of_planes: list[PlaneWaits] = [replies[name] for name in planes if name in replies]
        complete = len(of_planes) == len(planes)
        waits = [wait for reply in of_planes for wait in reply.waits]
        if not complete:  # a replica that gives these planes' calls no token may work for the others
            waits = [wait for wait in waits if wait.kind is not WaitKind.REPLICA]
        whole, known = complete and all(reply.whole for reply in of_planes), _names(waits)
        of_workers: dict[str, list[Wait]] = {name: replies[name] for name in workers if name in replies}
        self.hosts = {wait.name: name for name, found in of_workers.items() for wait in found}
        for found in of_workers.values():  # a group that the planes left out would seem to wait for nothing
            waits += [wait for wait in found if whole or wait.kind is not WaitKind.GROUP or wait.name in known]
        computing = set(self.parts.training())
        for name, seconds in silent.items():
            kind = WaitKind.COMPUTING if name in computing else WaitKind.ACTOR
            waits.append(Wait(kind, name, seconds, what="has not replied"))
        return merge([*waits, *self._of_trainer(waits, silent, [name for name in workers if name in silent])])

    def _ask(self, actors: Mapping[str, Any]) -> dict[str, Any]:
        """The replies that come in time, by name. One that was late is dropped; then its process is asked again."""
        late = {name: call for name, (call, _) in self.asked.items()}
        ended, _ = ray.wait(list(late.values()), num_returns=len(late), timeout=0) if late else ([], [])
        self.asked = {name: one for name, one in self.asked.items() if one[0] not in ended and name in actors}
        fresh = {name: actor.waits.remote() for name, actor in actors.items() if name not in self.asked}
        self.asked |= {name: (call, time.monotonic()) for name, call in fresh.items()}
        done, _ = ray.wait(list(fresh.values()), num_returns=len(fresh), timeout=REPLY_S) if fresh else ([], [])
        replies = dict[str, Any]()
        for name, call in fresh.items():
            if call in done:
                del self.asked[name]
                with suppress(*ACTOR_GONE):  # a death is reported elsewhere
                    replies[name] = ray.get(call)
        return replies

    def _silent(self) -> dict[str, float]:
        """For how many seconds each process that was asked has not replied."""
        now = time.monotonic()
        return {name: now - since for name, (_, since) in self.asked.items()}

    def _of_trainer(self, waits: Sequence[Wait], silent: Mapping[str, float], hosts: Sequence[str]) -> list[Wait]:
        """The trainer, its commit, groups of which nobody knows who replied, and a queue of which a part is silent."""
        (stage, seconds), names = self.parts.stage(), _names(waits)
        training = [name for name in self.parts.training() if name in silent]
        others = [name for name in silent if name not in training]  # for any of them it may wait
        groups = [name for name in map(group_name, self.parts.outstanding()) if name in names or hosts]
        queue = [name for name in silent if name.startswith(QUEUE)]
        commands = [wait.name for wait in waits if wait.kind is WaitKind.COMMAND]
        found = [Wait(WaitKind.GROUP, name, 0.0, tuple(hosts)) for name in groups if name not in names]
        found += [Wait(WaitKind.QUEUE, QUEUE, 0.0, tuple(queue), "has not taken rows")] if queue else []
        on = [*(groups if stage.startswith(FOR_GROUPS) else training), *commands, *others]
        if (commit := self.parts.commit()) is not None:
            name = f"the commit of version {commit[0]}"
            found.append(Wait(WaitKind.COMMIT, name, commit[1], (*commands, *training), "has not ended"))
            on.append(name)
        return [*found, Wait(WaitKind.TRAINER, TRAINER, seconds, tuple(on), stage)]

    def concerned(self, blocked: Blocked) -> set[str]:
        """The processes of the chain's last two nodes, by the names of their actors; the trainer by its own name."""
        names = set[str]()
        for wait in blocked.chain[-2:]:
            match wait.kind:
                case WaitKind.TRAINER | WaitKind.COMMIT:
                    names.add(TRAINER)
                case WaitKind.GROUP | WaitKind.SESSION:
                    names |= {self.hosts[one.name] for one in blocked.chain if one.name in self.hosts}
                case WaitKind.COMMAND:
                    names.add(FIRST_PLANE)
                case WaitKind.SERVER:
                    names.add(wait.name.removeprefix(server_name("")))
                case _:
                    names.add(wait.name)
        return names


def _names(waits: Iterable[Wait]) -> set[str]:
    return {wait.name for wait in waits}
