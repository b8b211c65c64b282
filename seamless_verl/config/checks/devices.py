"""Devices: how many a run asks for, how many there are, and what the CPU platform's devices cannot do."""

from __future__ import annotations

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.roles import by_tags, has_standalone_rollout, has_teacher, uses_megatron
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.checks.sizes import MEGATRON, ROLLOUT, standalone_devices, trainer_world
from seamless_verl.resources.tags import KEY as RESOURCES
from seamless_verl.resources.tags import Resources

MEGATRON_DTYPES = ("bfloat16", "float16")


def pools(settings: Settings) -> dict[str, int]:
    """Devices of every pool the run would create, by the config node that sizes it."""
    sizes = {"trainer": trainer_world(settings)}
    if has_standalone_rollout(settings):
        sizes[ROLLOUT] = standalone_devices(settings)
    if settings.flag("reward.reward_model.enable_resource_pool"):
        sizes["reward.reward_model"] = _pool(settings, "reward.reward_model")
    if has_teacher(settings):
        sizes["distillation"] = _pool(settings, "distillation")
    return sizes


@check
def check_devices(settings: Settings) -> list[Problem]:
    """All pools together fit the devices there are, when that number is known."""
    there_are, resources = settings.host.devices, settings.seamless.resources
    if by_tags(settings) and resources is not None:
        return [] if there_are is None or resources.size <= there_are else [_too_many(settings, resources)]
    asked = pools(settings)
    total = sum(asked.values())
    if there_are is None or total <= there_are:
        return []
    largest = max(asked, key=lambda node: asked[node])
    per_node, nodes = (f"{largest}.{name}" for name in ("n_gpus_per_node", "nnodes"))
    key = nodes if settings.integer(nodes, 1) > settings.integer(per_node, 1) else per_node
    parts = " + ".join(f"{node} {size}" for node, size in asked.items())
    reason = f"the run asks for {total} devices ({parts}) and there are {there_are}"
    return [Problem(key, settings.get(key), reason, _fewer(settings, largest))]


@check
def check_cores(settings: Settings) -> list[Problem]:
    """On the CPU, pinned devices have a core each."""
    cpu, cores = settings.seamless.cpu, settings.host.cores
    if settings.host.accelerator or cpu.device_count <= cores:
        return []
    key, reason = "seamless.cpu.devices", f"is more than the {cores} cores this process may use"
    if cpu.pin:
        way_out = f"Set {key}={cores}, or seamless.cpu.pin=false to let devices share cores"
        return [Problem(key, cpu.devices, reason, way_out)]
    return [Problem(key, cpu.devices, reason, "Devices will share cores and time", warning=True)]


@check
def check_engine_dtype(settings: Settings) -> list[Problem]:
    """verl's Megatron engine trains in half precision only (verl/workers/config/engine.py)."""
    key = f"{MEGATRON}.dtype"
    if not uses_megatron(settings) or settings.get(key, "bfloat16") in MEGATRON_DTYPES:
        return []
    reason = f"verl's Megatron engine takes only {' and '.join(MEGATRON_DTYPES)}"
    return [Problem(key, settings.get(key), reason, f"Set {key}=bfloat16")]


@check
def check_cpu_rollout(settings: Settings) -> list[Problem]:
    """The CPU platform generates with vLLM and moves weights over gloo."""
    if settings.host.accelerator:
        return []
    problems, name = [], settings.text(f"{ROLLOUT}.name")
    if name != "vllm":
        way_out = f"Set {ROLLOUT}.name=vllm"
        problems.append(Problem(f"{ROLLOUT}.name", name, "does not run on the CPU platform", way_out))
    key = f"{ROLLOUT}.checkpoint_engine.backend"
    backend = settings.get(key, "naive")
    if backend == "nccl":
        problems.append(Problem(key, backend, "needs an accelerator", f"Set {key}=gloo"))
    return problems


def _pool(settings: Settings, node: str) -> int:
    return settings.integer(f"{node}.nnodes") * settings.integer(f"{node}.n_gpus_per_node")


def _too_many(settings: Settings, resources: Resources) -> Problem:
    sizes = " + ".join(f"{group.name} {group.size}" for group in resources.groups)
    reason = f"its machines have {resources.size} devices ({sizes}) and there are {settings.host.devices}"
    more = "add devices"
    if not settings.host.accelerator:
        more = "share cores: seamless.cpu.devices=<number> seamless.cpu.pin=false"
    return Problem(RESOURCES, resources.summary(), reason, f"Lower count or devices of a group, or {more}")


def _fewer(settings: Settings, largest: str) -> str:
    keys = f"Lower {largest}.n_gpus_per_node or {largest}.nnodes"
    if settings.host.accelerator:
        return f"{keys}, or add devices"
    return f"{keys}, or share cores: seamless.cpu.devices=<number> seamless.cpu.pin=false"
