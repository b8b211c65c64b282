"""Names within seconds what a run lost: an actor that it needs, a node, or one of Ray's processes; recovers parts.

Replicas and data planes are not among the actors: a run survives their deaths. Ray tells a death only to those who wait
for a reply, so each actor always has one call of ours that only says where it is; it is answered when the actor has
time. Of Ray's own processes nobody else says that they ended, or only much later: without its GCS all others end a
minute later, without an error that names it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from transfer_queue import interface

from seamless_verl.agent_loops.assignments import SETTING, WINDOW_S
from seamless_verl.data_plane.waits import group_name, session_name
from seamless_verl.errors import ActorLostError, shorten
from seamless_verl.resources.machines import ClusterNode, Machine, describe_clock, describe_loss
from seamless_verl.runtime.actor_death import ACTOR_GONE, ENDED, death_reason, last_line
from seamless_verl.runtime.console import KILLED, keep_cause, say
from seamless_verl.runtime.process import BackgroundTask, await_end
from seamless_verl.runtime.waits import Blocked, WaitKind, is_over
from seamless_verl.trainer.pools import cluster_nodes
from seamless_verl.trainer.run_waits import REPLY_S, SETTINGS
from seamless_verl.trainer.watchdog import Recover

if TYPE_CHECKING:
    from seamless_verl.agent_loops.manager import SeamlessAgentLoopManager

logger = logging.getLogger(__name__)
LOOP_WORKER = "agent loop worker"
SOON_S = 5.0  # for the call to a dead actor to fail, after another call to it did
NODE_DEAD_S = 45.0  # for Ray to know that a node is dead, which takes some 15 s: until then its actors are unavailable
POLL_S = 0.2
REWARD_WORKER = "reward worker"
CODE_OF_USERS = {
    REWARD_WORKER: "The reward function runs in it: one that raises an error loses its session alone",
    LOOP_WORKER: "An agent that is a function runs in it: as a command, or in a runner, it would end alone",
}
CLOCK_REPLY_S = 10.0
NEEDED = ("gcs_server", "raylet")
LOG_MONITOR = "log_monitor"
SILENT = (
    "Ray's log monitor has ended, so nothing more that the run's processes print is shown, but its steps are; "
    "what they print is in Ray's logs"
)


@dataclass(eq=False)
class DeathWatch:
    """Watches actors. Owned state: one call for each of them, when it began, and their nodes."""

    actors: Callable[[], Mapping[str, Any]]  # by name
    describe: Callable[[str], str | None] = lambda node: None
    """what became of a node that is gone, by its id; None for one that lives"""
    replaces: Callable[[str], bool] = lambda name: False  # for which dead actors `replace` starts another
    replace: Callable[[str, str], None] = lambda name, why: None
    calls: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, float] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)

    def check(self, *, ending: bool = False) -> None:
        """Returns at once; of a run that is `ending` nothing is replaced.

        Raises:
            ActorLostError: some are dead and not replaced; it names them all, and their nodes where those are gone.
        """
        for name, actor in self.actors().items():
            if name not in self.calls:
                self.calls[name], self.asked[name] = actor.__ray_call__.remote(own_node), time.monotonic()
        done, _ = ray.wait(list(self.calls.values()), num_returns=len(self.calls), timeout=0)
        names = {call: name for name, call in self.calls.items()}
        dead = dict[str, str]()
        for call in done:
            name = names[call]
            del self.calls[name]
            try:
                self.nodes[name] = ray.get(call)
            except ray.exceptions.ActorUnavailableError:  # perhaps only the network was away
                continue
            except ACTOR_GONE as error:
                dead[name] = last_line(error)
        replaced = {name for name in dead if self.replaces(name)}
        if for_good := {name: why for name, why in dead.items() if name not in replaced}:
            raise ActorLostError(", ".join(sorted(for_good)), self._reason(for_good))
        for name in replaced if not ending else ():
            self.replace(name, self._reason({name: dead[name]}))

    def silent_s(self) -> dict[str, float]:
        """For how many seconds each actor that owes a reply has not replied, by name; one that computes does not."""
        now = time.monotonic()
        return {name: now - self.asked[name] for name in self.calls}

    def check_soon(self, error: BaseException) -> None:
        """As `check`, for some time: this ACTOR_GONE, or groups that failed, may be of the death of one of these."""
        unavailable = isinstance(error, ray.exceptions.ActorUnavailableError)
        deadline = time.monotonic() + (NODE_DEAD_S if unavailable else SOON_S)
        while time.monotonic() < deadline:
            self.check(ending=True)
            time.sleep(POLL_S)  # nothing notifies of a call that fails

    def _reason(self, dead: Mapping[str, str]) -> str:
        nodes = dict.fromkeys(self.nodes[name] for name in dead if name in self.nodes)
        gone = [text for node in nodes if (text := self.describe(node)) is not None]
        if gone:
            return "; ".join(gone)
        name, why = next(iter(dead.items()))
        code = CODE_OF_USERS.get(name.rpartition(" ")[0])
        return f"{why}. {code}" if code and why == ENDED else why


def own_node(actor: Any) -> str:
    """What a watched actor does: it says on which node it is."""
    return str(ray.get_runtime_context().get_node_id())


def numbered(name: str, actors: Any) -> dict[str, Any]:
    """Actors of one kind, by a name for each."""
    return {f"{name} {number}": actor for number, actor in enumerate(actors or ())}


def queue_actors() -> dict[str, Any]:
    """The controller and the storage units of the TransferQueue that this process has started."""
    controller = {} if interface._TQ_CONTROLLER is None else {"TransferQueue controller": interface._TQ_CONTROLLER}
    units = (interface._TQ_STORAGE or {}).get("SimpleStorage") or {}
    return controller | numbered("TransferQueue storage", units.values())


class Recoveries:
    """What a run does about a part that is over its limit, and about an agent loop worker that died.

    | what | recovery |
    |---|---|
    | a replica that gives no tokens | it is given up, and by default started again; its calls continue on others |
    | a group that waits for an agent that has no call | its session is ended, as a failed one |
    | the server of a replica | its data plane gives it up by itself, at the same limit |
    | an agent loop worker that is dead | another one is started in its place, in a thread |

    verl's TransferQueue and a transfer of weights cannot be begun again by another thread. `plane` is the first data
    plane; `loops` is the agent loop manager, None for one of the user's own.
    """

    def __init__(self, plane: Any, loops: SeamlessAgentLoopManager | None) -> None:
        self.plane, self.loops = plane, loops
        self.starting = dict[int, BackgroundTask[None]]()

    @property
    def by_kind(self) -> Mapping[WaitKind, Recover]:
        """By the kind of the node that is over its limit."""
        return {
            WaitKind.REPLICA: self.give_up,
            WaitKind.GROUP: self.end_group,
            WaitKind.SERVER: lambda blocked: True,
        }

    def give_up(self, blocked: Blocked) -> bool:
        """Gives the replica up, unless its calls could then continue nowhere, or its server is what does not reply."""
        replica = blocked.over
        if blocked.culprit is not replica:
            return False
        why = f"{replica.what} for {replica.waited_s:.0f} s ({SETTINGS[replica.kind]})"
        try:
            return bool(ray.get(self.plane.give_up.remote(replica.name, f"it {why}"), timeout=REPLY_S))
        except (*ACTOR_GONE, ray.exceptions.GetTimeoutError) as error:
            cause = shorten(death_reason(error))
            logger.warning("the data plane does not reply, and %s is not given up: %s", replica.name, cause)
            return False

    def end_group(self, blocked: Blocked) -> bool:
        """Ends the session of a group whose agent has had no call for as long as the group's limit.

        Known are those that the group's agent loop worker opened: not those of runners, or of verl's own agent loops.
        """
        group, culprit = blocked.over, blocked.culprit
        quiet = is_over(replace(culprit, kind=WaitKind.GROUP), blocked.limits)
        if self.loops is None or not quiet or culprit.kind is not WaitKind.SESSION:
            return False
        session = culprit.name.removeprefix(session_name(""))
        reason = f"its group has not ended for {group.waited_s:.0f} s ({SETTINGS[group.kind]}): {blocked}"
        self.loops.end_stuck(group.name.removeprefix(group_name("")), session, reason)
        return True

    def starts_again(self, name: str) -> bool:
        """Whether this actor is an agent loop worker that is started again when it is dead."""
        return self.loops is not None and self.loops.watched and name.rpartition(" ")[0] == LOOP_WORKER

    def start_again(self, name: str, why: str) -> None:
        """Starts another worker in the place of this one; raises ActorLostError if that was so too often."""
        assert self.loops is not None
        slot = int(name.rpartition(" ")[2])
        if slot in self.starting:  # the one in its place is not there yet
            return
        if not self.loops.restarts.take(slot):
            starts = f"{self.loops.restarts.limit} times within {WINDOW_S:g} s ({SETTING})"
            raise ActorLostError(name, f"{why}. It was started again {starts}")
        logger.warning("%s died, and is started again: %s", name, why)
        self.starting[slot] = BackgroundTask(f"start of {name}", partial(self.loops.begin_again, slot))

    def check(self) -> None:
        """Raises what the start of a worker has raised."""
        for slot in [slot for slot, task in self.starting.items() if task.future.done()]:
            self.starting.pop(slot).result()


class NodeWatch:
    """Watches the nodes of the cluster. `machines` gives the machines of the run that are on each node, by its id."""

    def __init__(
        self,
        machines: Callable[[], Mapping[str, Sequence[Machine]]],
        nodes: Callable[[], Sequence[ClusterNode]] = cluster_nodes,
    ) -> None:
        self.machines, self.nodes = machines, nodes
        self.alive = {node.node_id: node for node in nodes()}
        self.gone: dict[str, str] = {}  # what is said of each node that went, by its id

    def check(self) -> None:
        """Logs the nodes that went and came since the last call. Those of the trainer are reported by their actors."""
        now = {node.node_id: node for node in self.nodes()}
        for name, node in self.alive.items():
            if name not in now:
                self.gone[name] = describe_loss(node, self.machines().get(name, ()))
                logger.error("%s", self.gone[name])
        for name, node in now.items():
            if name not in self.alive:
                logger.warning("node %s has joined (%s)", node.address, node)
        self.alive = now

    def describe(self, node_id: str) -> str | None:
        """What is said of a node that is gone; None for one that lives."""
        self.check()
        return self.gone.get(node_id)


def clock_warnings(actors: Mapping[str, Any]) -> list[str]:
    """A warning for each of these actors, by name, whose clock differs from this process's by more than CLOCK_S."""
    asked, found = time.time(), list[str]()
    calls = {actor.__ray_call__.remote(own_clock): name for name, actor in actors.items()}
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=CLOCK_REPLY_S) if calls else ([], [])
    for call in done:
        with suppress(*ACTOR_GONE):  # reported as a death
            if (text := describe_clock(calls[call], asked, ray.get(call), time.time())) is not None:
                found.append(text)
    return found


def own_clock(actor: Any) -> float:
    return time.time()


def watch_ray_processes() -> None:
    """From now on, in the process that started Ray: one that is needed is the cause of the run's end, if it ends."""
    node = ray._private.worker._global_node  # None in a cluster that was there before
    processes = {} if node is None else node.all_processes
    for name in (*NEEDED, LOG_MONITOR):
        if info := processes.get(name):
            process = info[0].process
            with suppress(OSError):  # it has ended, or the system gives out no handles of processes
                awaited = (name, process, os.pidfd_open(process.pid))
                threading.Thread(target=_say_end, args=awaited, name=f"end of {name}", daemon=True).start()


def _say_end(name: str, process: subprocess.Popen[bytes], handle: int) -> None:
    await_end(handle)
    if not ray.is_initialized():  # the run ends
        return
    code = process.poll()
    by = f" by {signal.Signals(-code).name}, {KILLED}" if code == -signal.SIGKILL else ""
    if name == LOG_MONITOR:
        say(SILENT)
    else:
        keep_cause(f"Ray's process {name} (process id {process.pid}) was ended{by}")
