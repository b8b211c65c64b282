"""What a run does about a part that is over its limit, and about an agent loop worker that died.

| what | recovery |
|---|---|
| a replica that gives no tokens | it is given up, and by default started again; its calls continue on others |
| a group that waits for an agent that has no call | its session is ended, as a failed one |
| the server of a replica | its data plane gives it up by itself, at the same limit |
| an agent loop worker that is dead | another one is started in its place |

Others have none: verl's TransferQueue and a transfer of weights cannot be begun again by another thread.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from seamless_verl.agent_loops.assignments import SETTING, WINDOW_S
from seamless_verl.data_plane.waits import group_name, session_name
from seamless_verl.errors import ActorLostError, shorten
from seamless_verl.runtime.actor_death import ACTOR_GONE, death_reason
from seamless_verl.runtime.process import BackgroundTask
from seamless_verl.runtime.waits import Blocked, WaitKind, is_over
from seamless_verl.trainer.deaths import LOOP_WORKER
from seamless_verl.trainer.run_waits import REPLY_S, SETTINGS
from seamless_verl.trainer.watchdog import Recover

if TYPE_CHECKING:
    from seamless_verl.agent_loops.manager import SeamlessAgentLoopManager

logger = logging.getLogger(__name__)


class Recoveries:
    """The recoveries of a run, by the first data plane and the agent loop manager, None for one of the user's own.

    Dead agent loop workers are started again each in a thread, so that none of its waits holds up the watchdog.
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

        Only sessions that the group's agent loop worker has opened are known: not those of runners, which have leases,
        nor those of verl's own agent loops.
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
