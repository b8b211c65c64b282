"""What the data planes see of generation at one moment, for the lending policy. Pure data.

Calls are generations that an agent requested; tokens count since a data plane's process began.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """One replica: its `running` calls, frozen ones too, of which `urgent` are of groups that training waits for.

    `seats` is how many calls it may run at once, 0 while it is dead, `generated` the tokens of its calls so far, and
    `longest` the tokens that its longest call is expected to generate still. It `serves` unless it is paused, loads
    weights or is dead.
    """

    replica_id: str
    running: int = 0
    urgent: int = 0
    seats: int = 0
    generated: int = 0
    longest: float = 0.0
    serves: bool = True

    def __add__(self, other: ReplicaLoad) -> ReplicaLoad:
        """The same replica as two data planes see it that share it."""
        return ReplicaLoad(
            self.replica_id,
            self.running + other.running,
            self.urgent + other.urgent,
            self.seats + other.seats,
            self.generated + other.generated,
            max(self.longest, other.longest),
            self.serves and other.serves,
        )


@dataclass(frozen=True, slots=True)
class RolloutObservation:
    """The replicas, how many calls wait for a seat, and how many groups have ended."""

    replicas: tuple[ReplicaLoad, ...] = ()
    waiting: int = 0
    finished: int = 0

    def of(self, replica_id: str) -> ReplicaLoad:
        """That replica's load; an empty one for a replica that no data plane knows."""
        return next((load for load in self.replicas if load.replica_id == replica_id), ReplicaLoad(replica_id))


def merged(observations: Iterable[RolloutObservation]) -> RolloutObservation:
    """What several data planes see that share their replicas."""
    loads: dict[str, ReplicaLoad] = {}
    waiting = finished = 0
    for observation in observations:
        waiting, finished = waiting + observation.waiting, finished + observation.finished
        for load in observation.replicas:
            loads[load.replica_id] = loads.get(load.replica_id, ReplicaLoad(load.replica_id)) + load
    return RolloutObservation(tuple(loads.values()), waiting, finished)
