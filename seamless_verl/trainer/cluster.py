"""The nodes of the Ray cluster, as machines of a plan are compared with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from verl.plugin.platform import get_platform

from seamless_verl.resources.machines import ClusterNode


def cluster_nodes() -> list[ClusterNode]:
    """The nodes that are alive, ordered by address, as verl orders ranks."""
    resource = device_resource()
    available = ray._private.state.available_resources_per_node()  # as in verl's own check
    draining = ray._private.state.state.get_draining_nodes()  # Ray 2.60 says it nowhere else
    alive = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (node["NodeManagerAddress"], node["NodeID"]),
    )
    found = [_cluster_node(node, available.get(node["NodeID"], node["Resources"]), resource) for node in alive]
    return [replace(node, leaving=node.node_id in draining) for node in found]


def _cluster_node(node: Mapping[str, Any], available: Mapping[str, float], resource: str) -> ClusterNode:
    """`available`: of its resources, those that are free; all of them where a new node is not listed yet."""
    return ClusterNode(
        node["NodeID"],
        devices=int(node["Resources"].get(resource, 0)),
        free=int(available.get(resource, 0)),
        labels=tuple(sorted(node["Labels"].items())),
        address=node["NodeManagerAddress"],
        cpus=node["Resources"].get("CPU", 0.0),
        free_cpus=available.get("CPU", 0.0),
    )


def device_resource() -> str:
    return str(get_platform().ray_resource_name())
