"""Finds out within seconds that an actor died without which a run would wait for ever.

Replicas and data planes are not among them: a run survives their deaths. Ray tells a death only to those who wait for
a reply, so each actor always has one call of ours that does nothing; it is answered when the actor has time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from transfer_queue import interface

from seamless_verl.errors import ActorLostError


class DeathWatch:
    """Watches actors, which `actors` gives by name. Owned state: one call for each of them."""

    def __init__(self, actors: Callable[[], Mapping[str, Any]]) -> None:
        self.actors = actors
        self.calls: dict[str, Any] = {}

    def check(self) -> None:
        """Returns at once.

        Raises:
            ActorLostError: some are dead; it names them all.
        """
        for name, actor in self.actors().items():
            if name not in self.calls:
                self.calls[name] = actor.__ray_call__.remote(nothing)
        done, _ = ray.wait(list(self.calls.values()), num_returns=len(self.calls), timeout=0)
        names = {call: name for name, call in self.calls.items()}
        dead = {names[call]: why for call in done if (why := death(call)) is not None}
        for call in done:
            del self.calls[names[call]]
        if dead:
            raise ActorLostError(", ".join(sorted(dead)), next(iter(dead.values())))


def nothing(actor: Any) -> None:
    """What a watched actor does."""


def death(call: Any) -> str | None:
    """Why the actor that was called is dead; None if it lives, or if only the network was away."""
    try:
        ray.get(call)
    except ray.exceptions.ActorUnavailableError:
        return None
    except ray.exceptions.RayActorError as error:
        return str(error).strip().splitlines()[-1]
    return None


def numbered(name: str, actors: Any) -> dict[str, Any]:
    """Actors of one kind, by a name for each."""
    return {f"{name} {number}": actor for number, actor in enumerate(actors or ())}


def queue_actors() -> dict[str, Any]:
    """The controller and the storage units of the TransferQueue that this process has started."""
    controller = {} if interface._TQ_CONTROLLER is None else {"TransferQueue controller": interface._TQ_CONTROLLER}
    units = (interface._TQ_STORAGE or {}).get("SimpleStorage") or {}
    return controller | numbered("TransferQueue storage", units.values())
