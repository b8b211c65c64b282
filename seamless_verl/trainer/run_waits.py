"""What the watchdog asks the processes of a run: who waits for whom, whether calls generate, and their stacks.

Nobody is waited for long: a process that does not reply in time is in the graph of waits itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray

from seamless_verl.config.schema import WatchdogConfig
from seamless_verl.data_plane.waits import PlaneWaits, group_name, server_name
from seamless_verl.runtime.actor_death import ACTOR_GONE
from seamless_verl.runtime.process import own_stacks, stack_report
from seamless_verl.runtime.waits import QUEUE, TRAINER, Blocked, Limits, Wait, WaitKind, merge

REPLY_S = 5.0  # for what a process waits for
PROGRESS_REPLY_S = 1.0  # replies take milliseconds; one that comes later is read at the next look
STACKS_REPLY_S = 10.0
SILENT_S = 10.0  # an actor that owes a reply for longer is in the graph
FIRST_PLANE = "data plane"
FOR_GROUPS = ("waiting for groups", "validating")
"""The first words of the stages in which the trainer waits for groups."""

KEY = "seamless.watchdog"
LONG, SILENT, TRANSITION = f"half of {KEY}.no_progress_s", f"2 x {KEY}.transition_s", f"{KEY}.transition_s"
SETTINGS = {
    WaitKind.GROUP: f"{KEY}.group_s",
    **dict.fromkeys((WaitKind.CALL, WaitKind.REPLICA, WaitKind.QUEUE), SILENT),
    WaitKind.SERVER: TRANSITION,
    **dict.fromkeys((WaitKind.COMMIT, WaitKind.ACTOR), LONG),
}
"""From which setting each limit follows."""


def limits_of(watchdog: WatchdogConfig) -> Limits:
    """The limit of each kind; the replicas' servers have one in the data plane, too."""
    seconds = {LONG: watchdog.long_s, SILENT: watchdog.silent_s, TRANSITION: float(watchdog.transition_s)}
    return {kind: seconds.get(setting, watchdog.group_s) for kind, setting in SETTINGS.items()}


@dataclass
class RunWaits:
    """Collects the waits of a run from what gives each part of it at the moment.

    Owned state: the questions without a reply, one for each process at most, with the time on the monotonic clock; and
    the worker of each group.
    """

    stage: Callable[[], tuple[str, float]]  # the trainer's, and for how many seconds it has been in it
    planes: Callable[[], Mapping[str, Any]]  # data planes by name
    workers: Callable[[], Mapping[str, Any]]  # agent loop workers by name, without those of a user's own manager
    silent_s: Callable[[], Mapping[str, float]]  # for how many seconds actors have not replied, by name
    training: Callable[[], Iterable[str]]  # which of these are the trainer's workers
    commit: Callable[[], tuple[int, float] | None]  # the version that is being committed, and for how many seconds
    outstanding: Callable[[], Iterable[str]]  # uids of the prompts whose groups the trainer has not taken
    asked: dict[str, tuple[Any, float]] = field(default_factory=dict)
    hosts: dict[str, str] = field(default_factory=dict)

    def collect(self) -> list[Wait]:
        """The nodes now; takes `REPLY_S` seconds at most."""
        planes, workers = self.planes(), self.workers()
        replies = self._ask(planes | workers)
        silent = {name: seconds for name, seconds in self.silent_s().items() if seconds > SILENT_S}
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
        computing = set(self.training())
        for name, seconds in silent.items():
            kind = WaitKind.COMPUTING if name in computing else WaitKind.ACTOR
            waits.append(Wait(kind, name, seconds, what="has not replied"))
        return merge([*waits, *self._of_trainer(waits, silent, [name for name in workers if name in silent])])

    def _ask(self, actors: Mapping[str, Any]) -> dict[str, Any]:
        """The replies that come in time, by name. One that was late is dropped; then its process is asked again."""
        ended = _ready([call for call, _ in self.asked.values()], 0)
        self.asked = {name: one for name, one in self.asked.items() if one[0] not in ended and name in actors}
        fresh = {name: actor.waits.remote() for name, actor in actors.items() if name not in self.asked}
        self.asked |= {name: (call, time.monotonic()) for name, call in fresh.items()}
        done, replies = _ready(list(fresh.values()), REPLY_S), dict[str, Any]()
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
        (stage, seconds), names = self.stage(), _names(waits)
        training = [name for name in self.training() if name in silent]
        others = [name for name in silent if name not in training]  # for any of them it may wait
        groups = [name for name in map(group_name, self.outstanding()) if name in names or hosts]
        queue = [name for name in silent if name.startswith(QUEUE)]
        commands = [wait.name for wait in waits if wait.kind is WaitKind.COMMAND]
        found = [Wait(WaitKind.GROUP, name, 0.0, tuple(hosts)) for name in groups if name not in names]
        found += [Wait(WaitKind.QUEUE, QUEUE, 0.0, tuple(queue), "has not taken rows")] if queue else []
        on = [*(groups if stage.startswith(FOR_GROUPS) else training), *commands, *others]
        if (commit := self.commit()) is not None:
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


def plane_names(count: int) -> list[str]:
    """The names of the data planes in the graph."""
    return [FIRST_PLANE, *(f"{FIRST_PLANE} {shard}" for shard in range(1, count))]


def _names(waits: Iterable[Wait]) -> set[str]:
    return {wait.name for wait in waits}


def _ready(calls: list[Any], timeout_s: float) -> list[Any]:
    """Those of the calls that end within so many seconds."""
    return list(ray.wait(calls, num_returns=len(calls), timeout=timeout_s)[0]) if calls else []


class PlaneProgress:
    """The sum of the data planes' counts, which grows while calls generate; any of them may have all that are left.

    One that hangs, or is started again, keeps nobody from seeing that others generate. Owned state: of each data plane
    its last count, and the question that has no reply yet. One thread asks.
    """

    def __init__(self, planes: Sequence[Any]) -> None:
        self.planes = planes
        self.asked: dict[int, Any] = {}
        self.counts: dict[int, float] = {}

    def __call__(self) -> float | None:
        """The sum of the last counts, also of data planes that are gone; None before the first reply."""
        for number, plane in enumerate(self.planes):
            if number not in self.asked:
                self.asked[number] = plane.progress.remote()
        ready = _ready(list(self.asked.values()), PROGRESS_REPLY_S)
        for number in [number for number, reply in self.asked.items() if reply in ready]:
            with suppress(ray.exceptions.RayError):
                self.counts[number] = float(ray.get(self.asked.pop(number)))
        return sum(self.counts.values()) if self.counts else None


def stack_reports(replies: Mapping[str, ray.ObjectRef[str]]) -> str:
    """The stack reports that these calls return, each under the name of its process, or why there is none."""
    ready, sections = _ready(list(replies.values()), STACKS_REPLY_S), list[str]()
    for name, reply in replies.items():
        try:
            report = ray.get(reply) if reply in ready else f"no reply within {STACKS_REPLY_S} s"
        except ray.exceptions.RayError as error:  # it died
            report = f"no reply: {error}"
        sections.append(f"--- {name}\n{report}")
    return "\n".join(sections)


def stacks_of(names: Collection[str], actors: Mapping[str, Any]) -> str:
    """The stacks of these processes; of those that are among the `actors`, and of this one for the trainer."""
    replies = {name: actors[name].__ray_call__.remote(own_stacks) for name in sorted(names) if name in actors}
    own = [f"--- {TRAINER}", stack_report()] if TRAINER in names else []
    return "\n".join([*own, stack_reports(replies)])
