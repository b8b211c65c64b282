"""Starts the task runner on a node that the run needs anyway, and names the node when it is lost.

Ray would start it on any node. It has the data plane beside it, so that the loss of its node ends the run. Where
machines have tags, they are compared with the cluster here: a run that cannot be placed is refused before its task
runner has imported anything.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from omegaconf import DictConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seamless_verl.config.environment import variables_of
from seamless_verl.config.planning import plan_by_tags
from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.errors import ActorLostError
from seamless_verl.platform.adaptation import ActorClassWith
from seamless_verl.resources.machines import ClusterNode, Machine, describe_loss, runner_node
from seamless_verl.runtime.actor_death import last_line
from seamless_verl.trainer.cluster import cluster_nodes
from seamless_verl.trainer.deaths import watch_ray_processes
from seamless_verl.trainer.pools import TagPools
from seamless_verl.trainer.task_runner import task_runner_class


class PlacedTaskRunner:
    """Stands in for the actor class in verl's `run_ppo`, which starts one when Ray is connected."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.node: ClusterNode | None = None
        self.machines: dict[str, list[Machine]] = {}  # of the plan, by the ids of their nodes

    def remote(self) -> Any:
        return self.options().remote()

    def options(self, **options: Any) -> Any:
        """The actor class with these options, on its node. Ray chooses one for a run without tags.

        Raises:
            ConfigError: a machine has no node, or no node has room for the task runner; not where such are waited for.
        """
        watch_ray_processes()
        plan = plan_by_tags(self.config)
        if plan is not None:
            wait_s = SeamlessConfig.parse(self.config.get("seamless")).wait_for_machines_s
            self.machines = TagPools(plan, wait_s=wait_s).machines_by_node()
            self.node = runner_node(plan, ray.get_runtime_context().get_node_id(), cluster_nodes(), awaited=wait_s > 0)
        if self.node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(self.node.node_id, soft=False)
        given = ActorClassWith(task_runner_class(), variables=variables_of(self.config, os.environ))
        return given.options(**options)

    def lost(self, error: BaseException) -> ActorLostError:
        """The error of a run whose task runner died with this ACTOR_GONE: it names the node, where that is gone."""
        reason = last_line(error)
        if self.node is not None and self.node.node_id not in {node.node_id for node in cluster_nodes()}:
            reason = describe_loss(self.node, self.machines.get(self.node.node_id, ()))
        return ActorLostError("the task runner", reason)
