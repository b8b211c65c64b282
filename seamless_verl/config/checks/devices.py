"""Checks of devices: how many a run needs, the tags of machines, memory, parallel sizes, and the CPU platform.

The pools of a run fit the devices. With tags, a plan exists, verl's fields agree with it, and everything fits in
memory. Megatron's sizes divide the trainer's world, and a replica's size divides its pool.

Sources: megatron/core/parallel_state.py `initialize_model_parallel`, verl/workers/engine_workers.py
`init_model`, verl/workers/rollout/llm_server.py, verl/workers/config/rollout.py.
"""

from __future__ import annotations

import os

from seamless_verl.config.roles import (
    MEGATRON,
    ROLLOUT_KEY,
    by_tags,
    has_hybrid_rollout,
    has_standalone_rollout,
    has_teacher,
    joins_cluster,
    replica_sizes,
    standalone_devices,
    starts_cluster,
    trainer_sizes,
    trainer_world,
    uses_megatron,
)
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.resources.memory_fit import MemoryProblem, memory_problems
from seamless_verl.resources.placement import verl_fields
from seamless_verl.resources.tags import KEY, ROLLOUT, TRAIN, Layout, Resources
from seamless_verl.resources.tags import KEY as RESOURCES
from seamless_verl.resources.visible_devices import (
    ORDER,
    PCI,
    VARIABLE,
    installed_devices,
    order_problem,
    visible_devices,
)


def pools(settings: Settings) -> dict[str, int]:
    """Devices of every pool that the run creates, by the config node that has its size."""
    sizes = {"trainer": trainer_world(settings)}
    if has_standalone_rollout(settings):
        sizes[ROLLOUT_KEY] = standalone_devices(settings)
    if settings.flag("reward.reward_model.enable_resource_pool"):
        sizes["reward.reward_model"] = _pool(settings, "reward.reward_model")
    if has_teacher(settings):
        sizes["distillation"] = _pool(settings, "distillation")
    return sizes


@check
def check_devices(settings: Settings) -> list[Problem]:
    """All pools together fit the available devices, when their number is known."""
    available, resources = available_devices(settings), settings.seamless.resources
    if by_tags(settings) and resources is not None:
        fits = available is None or resources.size <= available
        return [] if fits else [_too_many(settings, resources, f"{available}{of_list(settings)}")]
    asked = pools(settings)
    total = sum(asked.values())
    if available is None or total <= available:
        return []
    largest = max(asked, key=lambda node: asked[node])
    per_node, nodes = (f"{largest}.{name}" for name in ("n_gpus_per_node", "nnodes"))
    key = nodes if settings.integer(nodes, 1) > settings.integer(per_node, 1) else per_node
    parts = " + ".join(f"{node} {size}" for node, size in asked.items())
    reason = f"the run needs {total} devices ({parts}) and there are {available}{of_list(settings)}"
    return [Problem(key, settings.get(key), reason, _fewer(settings, largest))]


@check
def check_cores(settings: Settings) -> list[Problem]:
    """A warning where devices of the CPU platform share cores; in a cluster that exists each node has its own."""
    cpu, cores = settings.seamless.cpu, settings.host.cores
    if settings.host.accelerator or joins_cluster(settings) or cpu.device_count <= cores:
        return []
    key, reason = "seamless.cpu.devices", f"is more than the {cores} cores this process may use"
    return [Problem(key, cpu.devices, reason, f"Devices share cores and time. Set {key}={cores} or less", warning=True)]


@check
def check_cpu_engines(settings: Settings) -> list[Problem]:
    """The CPU platform trains with Megatron or torch's second FSDP, generates with vLLM and moves weights over gloo."""
    if settings.host.accelerator:
        return []
    backend, strategy = f"{ROLLOUT_KEY}.checkpoint_engine.backend", settings.text(STRATEGY)
    found = {f"{ROLLOUT_KEY}.name": "vllm", STRATEGY: "fsdp2" if strategy.startswith("fsdp") else "megatron"}
    wrong = {key: other for key, other in found.items() if settings.text(key) != other}
    wrong |= {backend: "gloo"} if settings.get(backend) == "nccl" else {}
    reason = "does not run on the CPU platform"
    problems = [Problem(key, settings.get(key), reason, f"Set {key}={other}") for key, other in wrong.items()]
    if settings.flag(key := f"{ROLLOUT_KEY}.full_determinism"):
        reason = "asks vLLM for its batch-invariant operations, which are Triton's, and the CPU platform has none"
        problems.append(Problem(key, True, reason, f"Set {key}=False"))
    return problems


def _pool(settings: Settings, node: str) -> int:
    return settings.integer(f"{node}.nnodes") * settings.integer(f"{node}.n_gpus_per_node")


def _too_many(settings: Settings, resources: Resources, available: str) -> Problem:
    sizes = " + ".join(f"{group.name} {group.size}" for group in resources.groups)
    reason = f"its machines have {resources.size} devices ({sizes}) and there are {available}"
    more = "add devices"
    if not settings.host.accelerator:
        more = "share cores: seamless.cpu.devices=<number>"
    return Problem(RESOURCES, resources.summary(), reason, f"Lower count or devices of a group, or {more}")


def _fewer(settings: Settings, largest: str) -> str:
    keys = f"Lower {largest}.n_gpus_per_node or {largest}.nnodes"
    if settings.host.accelerator:
        return f"{keys}, or add devices"
    return f"{keys}, or share cores: seamless.cpu.devices=<number>"


STALENESS, STRATEGY = "seamless.max_staleness", "actor_rollout_ref.actor.strategy"


@check
def check_resources(settings: Settings) -> list[Problem]:
    """The tags, which only our trainer reads, lead to a plan, and verl's fields do not contradict them."""
    resources = settings.seamless.resources
    if resources is None:
        return []
    if not by_tags(settings):
        way_out = "Set trainer.v1.trainer_mode=seamless, or remove it"
        return [Problem(KEY, resources.summary(), "only the seamless trainer places machines by tags", way_out)]
    from seamless_verl.config.planning import plan_of

    contradictions = [*_layout(settings, resources), *_fields(settings, resources)]
    if contradictions:
        return contradictions
    unused = plan_of(settings).unused
    groups = {device.group for device in unused}
    return [*_slips(resources), *_unused(resources, groups), *_staleness(settings, resources)]


@check
def check_memory(settings: Settings) -> list[Problem]:
    """Everything fits in the devices' memory, as far as both are known; the longest micro-batch is a warning."""
    from seamless_verl.config.planning import memory_facts, plan_of

    pool_is_empty = has_standalone_rollout(settings) and not by_tags(settings) and not standalone_devices(settings)
    if pool_is_empty or memory_facts(settings) is None:
        return []  # the first is reported by check_standalone_pool
    problems = check_resources(settings)
    if any(not problem.warning for problem in problems):
        return []  # reported by that check
    return [_memory(settings, problem) for problem in memory_problems(plan_of(settings))]


def _layout(settings: Settings, resources: Resources) -> list[Problem]:
    asked, found = settings.seamless.layout, resources.layout
    if asked in (Layout.AUTO, found):
        return []
    reason = f"contradicts {KEY}, whose tags are a {found.value} layout"
    return [Problem("seamless.layout", asked.value, reason, "Remove it, or change the tags")]


def _fields(settings: Settings, resources: Resources) -> list[Problem]:
    from seamless_verl.config.planning import roles_of

    derived = verl_fields(resources, replica=replica_sizes(settings).size, needed=roles_of(settings).tags)
    return [
        Problem(key, settings.get(key), f"contradicts {KEY}, from which {value} follows", f"Remove {key}, or {KEY}")
        for key, value in derived.items()
        if settings.get(key) != value
    ]


def _slips(resources: Resources) -> list[Problem]:
    """Any tag may be one of the user's own; one that reads like a role's is asked about."""
    return [
        Problem(
            f"{KEY}[{i}].tags",
            list(resources.groups[i].tags),
            f"{tag} is a tag of your own, which gives no machine to the role {meant}",
            f"Did you mean {meant}?",
            warning=True,
        )
        for i, tag, meant in resources.slips()
    ]


def _unused(resources: Resources, names: set[str]) -> list[Problem]:
    return [
        Problem(f"{KEY}[{i}].tags", list(group.tags), f"no part of the run uses {group}", "Take it away", warning=True)
        for i, group in enumerate(resources.groups)
        if group.name in names
    ]


def _staleness(settings: Settings, resources: Resources) -> list[Problem]:
    """On-policy, machines that only generate and machines that train wait for each other in turns."""
    alone = resources.tagged(ROLLOUT, without=TRAIN)
    if settings.seamless.staleness_bound or not alone:
        return []
    reason = f"leaves {', '.join(group.name for group in alone)} idle whenever the trainer computes"
    return [Problem(STALENESS, 0, reason, f"Set {STALENESS}=1, or tag those machines train too", warning=True)]


def _memory(settings: Settings, found: MemoryProblem) -> Problem:
    value = settings.get(found.key)
    return Problem(found.key, value, found.reason, found.way_out, warning=not found.certain)


@check
def check_trainer_parallel(settings: Settings) -> list[Problem]:
    """Megatron's sizes divide the trainer's world."""
    world, sizes = trainer_world(settings), trainer_sizes(settings)
    if not uses_megatron(settings) or sizes is None or by_tags(settings):
        return []  # by tags the plan checks the sizes, group by group
    problems = []
    if world % sizes.model:
        key, _ = sizes.largest()
        reason = (
            f"TP {sizes.tensor} x PP {sizes.pipeline} x CP {sizes.context} = {sizes.model} "
            f"does not divide the trainer's {world} devices"
        )
        problems.append(Problem(key, settings.get(key), reason, _world_way_out(sizes.model)))
    # Without separate sizes for experts these are the same axes again.
    if sizes.experts != sizes.tensor * sizes.pipeline and world % sizes.experts:
        key = f"{MEGATRON}.expert_model_parallel_size"
        reason = (
            f"expert TP {sizes.expert_tensors} x EP {sizes.expert} x PP {sizes.pipeline} = {sizes.experts} "
            f"does not divide the trainer's {world} devices"
        )
        whole = sizes.experts // sizes.expert_tensors
        alone = sizes.expert_tensors > 1 and world % whole == 0
        cure = f"Set {MEGATRON}.expert_tensor_parallel_size=1, which leaves experts whole" if alone else None
        problems.append(Problem(key, sizes.expert, reason, cure or _world_way_out(sizes.experts)))
    return problems


@check
def check_rollout_parallel(settings: Settings) -> list[Problem]:
    """One replica's size divides each pool of replicas."""
    pools = {}
    if has_hybrid_rollout(settings):
        pools["the trainer's {} devices"] = trainer_world(settings)
    if has_standalone_rollout(settings):
        pools["the rollout pool's {} devices"] = standalone_devices(settings)
    # Prefill and decode replicas have sizes of their own.
    if settings.flag(f"{ROLLOUT_KEY}.disaggregation.enabled") or by_tags(settings):
        pools = {}
    replica = replica_sizes(settings).size
    uneven = {text.format(size): size for text, size in pools.items() if size % replica}
    return [_uneven_pool(settings, replica, text, size) for text, size in uneven.items()]


def _uneven_pool(settings: Settings, replica: int, text: str, size: int) -> Problem:
    key = f"{ROLLOUT_KEY}.tensor_model_parallel_size"
    reason = f"a replica of {replica} (TP x DP x PP) does not divide {text}"
    way_out = f"Set {key} so that {ROLLOUT_KEY}'s TP x DP x PP divides {size}"
    return Problem(key, settings.get(key), reason, way_out)


def _world_way_out(unit: int) -> str:
    return f"Lower it, or make trainer.nnodes x trainer.n_gpus_per_node a multiple of {unit}"


@check
def check_visible_devices(settings: Settings) -> list[Problem]:
    """CUDA_VISIBLE_DEVICES names whole devices of this machine, and each of them by itself."""
    installed = installed_devices()
    if not settings.host.accelerator or joins_cluster(settings) or not installed:
        return []
    value, order = os.environ.get(VARIABLE), os.environ.get(ORDER)
    visible_devices(installed, value)
    reason = order_problem(installed, value, order)
    return [] if reason is None else [Problem(ORDER, order, reason, f"Set {ORDER}={PCI}", warning=True)]


def available_devices(settings: Settings) -> int | None:
    """All devices that there are, None where only a running cluster, or an autoscaling one, knows."""
    if joins_cluster(settings):
        return None
    alone = starts_cluster(settings) and settings.get("ray_kwargs.ray_init.num_gpus") is None
    if settings.host.devices is not None or not settings.host.accelerator or not alone:
        return settings.host.devices
    installed = installed_devices()
    return len(visible_devices(installed, os.environ.get(VARIABLE))) if installed else None


def of_list(settings: Settings) -> str:
    """The list by which devices are left out, for a message; empty where there is none."""
    value = os.environ.get(VARIABLE) if settings.host.accelerator else None
    return "" if value is None else f" in {VARIABLE}={value}"
