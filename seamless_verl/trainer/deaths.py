"""Finds out within seconds that an actor died without which a run would wait for ever.

Replicas and data planes are not among them: a run survives their deaths. Ray tells a death only to those who wait for
a reply, so each actor always has one call of ours that only says where it is; it is answered when the actor has time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from transfer_queue import interface

from seamless_verl.errors import ActorLostError
from seamless_verl.runtime.actor_death import ACTOR_GONE, ENDED, last_line

LOOP_WORKER = "agent loop worker"
SOON_S = 5.0  # for the call to a dead actor to fail, after another call to it did
NODE_DEAD_S = 45.0  # for Ray to know that a node is dead, which takes some 15 s: until then its actors are unavailable
POLL_S = 0.2
REWARD_WORKER = "reward worker"
CODE_OF_USERS = {
    REWARD_WORKER: "The reward function runs in it: one that raises an error loses its session alone",
    LOOP_WORKER: "An agent that is a function runs in it: as a command, or in a runner, it would end alone",
}


class DeathWatch:
    """Watches actors, which `actors` gives by name. Owned state: one call for each of them, and their nodes.

    `describe` says what became of a node that is gone, by its id; None for one that lives. `replace` is told of each
    dead actor in whose place another is started, under the same name; `replaces` says which these are.
    """

    def __init__(
        self,
        actors: Callable[[], Mapping[str, Any]],
        describe: Callable[[str], str | None] = lambda node: None,
        replaces: Callable[[str], bool] = lambda name: False,
        replace: Callable[[str, str], None] = lambda name, why: None,
    ) -> None:
        self.actors, self.describe, self.replaces, self.replace = actors, describe, replaces, replace
        self.calls: dict[str, Any] = {}
        self.asked: dict[str, float] = {}  # when each of them began, on the monotonic clock
        self.nodes: dict[str, str] = {}

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
            node, why = reply_of(call)
            self.nodes |= {} if node is None else {name: node}
            dead |= {} if why is None else {name: why}
            del self.calls[name]
        replaced = {name for name in dead if self.replaces(name)}
        if for_good := {name: why for name, why in dead.items() if name not in replaced}:
            raise ActorLostError(", ".join(sorted(for_good)), self._reason(for_good))
        for name in replaced if not ending else ():
            self.replace(name, self._reason({name: dead[name]}))

    def silent_s(self) -> dict[str, float]:
        """For how many seconds each actor has not replied, by name; those that replied at the last check are left out.

        One that computes does not reply either.
        """
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


def reply_of(call: Any) -> tuple[str | None, str | None]:
    """The node of the actor that was called, and why it is dead, where it is; neither if only the network was away."""
    try:
        return ray.get(call), None
    except ray.exceptions.ActorUnavailableError:
        return None, None
    except ACTOR_GONE as error:
        return None, last_line(error)


def numbered(name: str, actors: Any) -> dict[str, Any]:
    """Actors of one kind, by a name for each."""
    return {f"{name} {number}": actor for number, actor in enumerate(actors or ())}


def queue_actors() -> dict[str, Any]:
    """The controller and the storage units of the TransferQueue that this process has started."""
    controller = {} if interface._TQ_CONTROLLER is None else {"TransferQueue controller": interface._TQ_CONTROLLER}
    units = (interface._TQ_STORAGE or {}).get("SimpleStorage") or {}
    return controller | numbered("TransferQueue storage", units.values())
