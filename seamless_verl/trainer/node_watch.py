"""Names the nodes of a run that go and come, and the clocks that differ from this one.

Invariant: a node is reported once when it goes and once when it comes. A node that comes back has another id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from seamless_verl.resources.machines import ClockReading, ClusterNode, Machine, describe_clock, describe_loss
from seamless_verl.runtime.actor_death import ACTOR_GONE
from seamless_verl.trainer.cluster import cluster_nodes

logger = logging.getLogger(__name__)
CLOCK_REPLY_S = 10.0


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
    asked, readings = time.time(), dict[str, ClockReading]()
    calls = {actor.__ray_call__.remote(own_clock): name for name, actor in actors.items()}
    done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=CLOCK_REPLY_S) if calls else ([], [])
    for call in done:
        try:
            readings[calls[call]] = ClockReading(asked, ray.get(call), time.time())
        except ACTOR_GONE:  # reported as a death
            continue
    return [text for name, reading in readings.items() if (text := describe_clock(name, reading)) is not None]


def own_clock(actor: Any) -> float:
    return time.time()
