"""The nodes that Ray has, and the refusal when they will not do."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from verl.plugin.platform import get_platform

from seamless_verl.errors import ConfigError
from seamless_verl.resources.tags import KEY
from seamless_verl.trainer.machines import Machine, Node, described


def cluster_nodes() -> list[Node]:
    """The nodes that are alive, ordered by address, as verl orders ranks."""
    resource = device_resource()
    free = ray._private.state.available_resources_per_node()  # as verl's own check asks
    alive = sorted(
        (node for node in ray.nodes() if node["Alive"]),
        key=lambda node: (node["NodeManagerAddress"], node["NodeID"]),
    )
    return [
        Node(
            node["NodeID"],
            devices=int(node["Resources"].get(resource, 0)),
            free=int(free.get(node["NodeID"], node["Resources"]).get(resource, 0)),  # a new node is not listed yet
            labels=tuple(sorted(node["Labels"].items())),
        )
        for node in alive
    ]


def device_resource() -> str:
    return str(get_platform().ray_resource_name())


def missing(machines: Sequence[Machine], nodes: Sequence[Node], what: str) -> ConfigError:
    """The refusal for machines without a node: by tag or label, with what the cluster has."""
    first = machines[0]
    key = f"{KEY}: group {first.group}"
    more = f" and {len(machines) - 1} more" if len(machines) > 1 else ""
    reason = f"{first}{more} {what}; {described(first, nodes)}"
    way_out = "Lower its count or devices, start such a node (ray start --labels), or set seamless.wait_for_machines_s"
    return ConfigError(key, dict(first.labels) or list(first.tags), reason, way_out)
