"""verl's own fields that say how many machines there are, derived so that no machine is described twice.

verl knows pools as rectangles, nodes x devices a node. A pool of machines that are not alike is given as
the rectangle of the same size whose rows divide every machine; the pool manager places the true machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import TypeAlias

from seamless_verl.resources.placement import trains_and_generates
from seamless_verl.resources.tags import REWARD, ROLLOUT, TEACHER, TRAIN, MachineGroup, Resources

Fields: TypeAlias = dict[str, int | bool]
NODES, PER_NODE = "nnodes", "n_gpus_per_node"
TRAINER_NODE, ROLLOUT_NODE = "trainer", "actor_rollout_ref.rollout"
REWARD_NODE, TEACHER_NODE = "reward.reward_model", "distillation"


def verl_fields(resources: Resources, *, replica: int, needed: Sequence[str]) -> Fields:
    """Values by dotted key; `replica` is a replica's size in devices, `needed` the tags of optional roles."""
    trainer, standalone = resources.tagged(TRAIN), resources.tagged(ROLLOUT, without=TRAIN)
    found = _rectangle(TRAINER_NODE, trainer)
    if standalone:
        found |= _rectangle(ROLLOUT_NODE, standalone, replica)
    else:
        # verl cuts hybrid replicas into servers of so many devices.
        per_node = min((group.devices for group in trains_and_generates(resources)), default=1)
        found |= {f"{ROLLOUT_NODE}.{NODES}": 0, f"{ROLLOUT_NODE}.{PER_NODE}": per_node}
    if REWARD in needed:
        own = [group for group in resources.tagged(REWARD) if TRAIN not in group.tags]
        found[f"{REWARD_NODE}.enable_resource_pool"] = bool(own)
        found |= _rectangle(REWARD_NODE, own) if own else {}
    if TEACHER in needed:
        found |= _rectangle(TEACHER_NODE, resources.tagged(TEACHER))
    return found


def _rectangle(node: str, groups: Sequence[MachineGroup], unit: int = 1) -> Fields:
    """Rows x columns of the same size; columns fit a unit where machines differ and a unit fits each of them."""
    counts = [group.devices for group in groups]
    size = sum(group.size for group in groups)
    columns = gcd(*counts) if counts else 1
    if len(set(counts)) > 1 and all(count % unit == 0 for count in counts):
        columns = max(unit, 1) if unit > 1 else columns
    return {f"{node}.{NODES}": size // columns, f"{node}.{PER_NODE}": columns}
