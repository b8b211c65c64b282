"""Keeps the actors that a run cannot lose on the nodes that it cannot lose either.

verl spreads agent loop workers, reward workers and TransferQueue over all nodes, and leaves its router to Ray. The loss
of a node that only generates would then end a run that could do without its replicas. Here these actors get the nodes
whose loss ends the run in any case. Without tags all nodes are alike, and verl's spreading stays. verl has no factory
for these: the name `ray` is another one in three of its modules while the actors are made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transfer_queue import interface
from transfer_queue.utils import common
from verl.experimental.agent_loop import agent_loop
from verl.experimental.reward_loop import reward_loop
from verl.workers.rollout import router

from seamless_verl.config.planning import plan_by_tags
from seamless_verl.platform.adaptation import rebound
from seamless_verl.resources.machines import needed_nodes
from seamless_verl.trainer.pools import cluster_nodes

SPREADING = (agent_loop, reward_loop, common, router)  # modules that choose nodes through their name `ray`
STORAGE_RESOURCE = "transfer_queue.backend.SimpleStorage.required_node_resource"


def nodes_of_run(config: DictConfig) -> list[str]:
    """`needed_nodes` of this run, for the process that is its task runner."""
    return needed_nodes(plan_by_tags(config), ray.get_runtime_context().get_node_id(), cluster_nodes())


def places_storage(config: DictConfig) -> bool:
    """Whether the user says by `STORAGE_RESOURCE` which nodes TransferQueue's storage is on."""
    return OmegaConf.select(config, STORAGE_RESOURCE) is not None


@contextmanager
def actors_on(nodes: Sequence[str], *, storage_elsewhere: bool = False) -> Iterator[None]:
    """In the block, actors that verl spreads are spread over these nodes, and those that it leaves to Ray are on the
    first one. With `storage_elsewhere` TransferQueue chooses the nodes of its storage among all."""
    ours, first = RayOn(nodes), nodes[0]
    with ExitStack() as stack:
        for module in SPREADING:
            if module is common and storage_elsewhere:
                continue
            stack.enter_context(rebound(module, ray=ours))
        controller = OnNode(interface.TransferQueueController, first)
        stack.enter_context(rebound(interface, TransferQueueController=controller))
        yield


class RayOn:
    """Stands in for the module `ray` where verl chooses nodes: it has these nodes only."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = tuple(nodes)

    def nodes(self) -> list[dict[str, Any]]:
        return of_these(ray.nodes(), self._nodes)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return OnNode(ray.remote(*args, **kwargs), self._nodes[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(ray, name)


def of_these(nodes: Sequence[dict[str, Any]], ids: Collection[str]) -> list[dict[str, Any]]:
    """Ray's records of these nodes. All of the living where none of them has a CPU, which verl asks for."""
    found = [node for node in nodes if node["NodeID"] in ids]
    return found if any(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in found) else list(nodes)


class OnNode:
    """Stands in for an actor class: its actors are on this node, unless a strategy is given."""

    def __init__(self, actor_class: Any, node: str) -> None:
        self.actor_class, self.node = actor_class, node

    def options(self, **options: Any) -> Any:
        strategy = NodeAffinitySchedulingStrategy(self.node, soft=True)
        return self.actor_class.options(**({"scheduling_strategy": strategy} | options))

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self.options().remote(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actor_class, name)
