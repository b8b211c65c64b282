"""Checks whether a plan's memory fits its devices and hosts, and reads this machine's memory without torch.

A problem names the largest part and the setting that lessens it. Sizes are in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from seamless_verl.resources.memory import ENGINE_COPIES, PROCESSES, STAGED, TRAINS, HostPeak
from seamless_verl.resources.placement import ReplicaKind
from seamless_verl.resources.plan import DevicePeak, Plan

MEMINFO = Path("/proc/meminfo")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_bytes(meminfo: Path = MEMINFO, limits: tuple[Path, ...] = LIMITS) -> int | None:
    """The host's memory, or a container's share of it; None when the system does not say."""
    if not meminfo.is_file():
        return None
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    total = int(found.group(1)) * 1024 if found else None
    given = [int(text) for path in limits if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([*([total] if total else []), *given], default=None)


ENGINE, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
TENSOR = f"{ACTOR}.megatron.tensor_model_parallel_size"
CACHE = (f"{ENGINE}.gpu_memory_utilization", "Lower it, or give the cache bytes: engine_kwargs.vllm")
TOKENS = (f"{ACTOR}.ppo_max_token_len_per_gpu", "Lower it, or set recompute_granularity=full")
ON_HOST = f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True"
RANKS = (TENSOR, f"Raise it or the pipeline's, give train more devices, or keep the optimizer on the host: {ON_HOST}")
LARGEST = {
    "KV cache": CACHE,
    "engine weights": (f"{ENGINE}.tensor_model_parallel_size", "Raise it"),
    "buckets": (f"{ENGINE}.checkpoint_engine.update_weights_bucket_megabytes", "Lower it"),
    "activations": ("data.max_response_length", "Lower it, or raise the tensor or context parallel size"),
    "processes": ("seamless.device_memory_gb", "Use fewer devices, or a machine with more memory"),
    "critic": ("critic.megatron.tensor_model_parallel_size", "Raise it, or use a smaller critic"),
}


HANDOVER = "seamless.handover"
RELEASE = f"set {HANDOVER}=released with {ENGINE}.free_cache_engine=True"
PUT_AWAY = f"offload what the trainer keeps: {ACTOR}.megatron.param_offload=True and optimizer_offload=True"
HOST_MEMORY = "seamless.host_memory_gb"
OFFLOAD = "Set it to False, or give train more machines"
LARGEST_ON_HOST = {
    STAGED: ("actor_rollout_ref.model.path", "Use a smaller model, or machines with more memory"),
    "offloaded weights": (f"{ACTOR}.megatron.param_offload", OFFLOAD),
    "offloaded reference": ("actor_rollout_ref.ref.megatron.param_offload", OFFLOAD),
    "offloaded optimizer": (f"{ACTOR}.megatron.optimizer_offload", OFFLOAD),
    "optimizer on the host": (f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload", OFFLOAD),
    ENGINE_COPIES: ("actor_rollout_ref.model.mtp.enable_rollout", "Set it to False: vLLM then keeps no copies"),
    PROCESSES: (HOST_MEMORY, "Use fewer devices of a machine, or machines with more memory"),
}


@dataclass(frozen=True)
class MemoryProblem:
    """One device, or one host, whose memory is too small; `certain` unless only for the longest micro-batch."""

    key: str
    reason: str
    way_out: str
    certain: bool


def memory_problems(plan: Plan) -> list[MemoryProblem]:
    """At most one for the devices of each group of machines and one for its hosts, or one for a host whose devices
    share its memory."""
    if plan.shared_memory:
        return _of_devices(plan.memory, plan.hosts, "all devices together", plan.device_bytes)
    on_devices = [
        problem
        for group, peak in _fullest(plan)
        for problem in _of_devices([peak], (), f"a device of group {group}", plan.device_bytes)
    ]
    return [*on_devices, *_of_hosts(plan)]


def gigabytes(size: int) -> str:
    return f"{size / 10**9:.1f} GB"


def both_sides(plan: Plan) -> DevicePeak | None:
    """The fullest of the devices that train and generate; None where no device does both, or memory is not known."""
    hybrid = {number for replica in plan.replicas_of(ReplicaKind.HYBRID) for number in replica.devices}
    return max((p for p in plan.memory if p.device in hybrid), key=lambda p: p.peak.bound, default=None)


def sizes(parts: Sequence[tuple[str, int]]) -> str:
    """The parts with their sizes, the largest first."""
    return ", ".join(f"{name} {gigabytes(size)}" for name, size in sorted(parts, key=lambda part: -part[1]))


def _fullest(plan: Plan) -> Iterator[tuple[str, DevicePeak]]:
    groups = {device.number: device.group for device in plan.devices}
    for name in dict.fromkeys(groups.values()):
        yield name, max((p for p in plan.memory if groups[p.device] == name), key=lambda p: p.peak.bound)


def _of_hosts(plan: Plan) -> list[MemoryProblem]:
    found: dict[str, MemoryProblem] = {}
    for host in plan.hosts:
        if plan.host_bytes is not None and host.size > plan.host_bytes:
            key, way_out = LARGEST_ON_HOST[max(host.parts, key=lambda part: part[1])[0]]
            needs = f"a machine of group {host.group} would need {gigabytes(host.size)} of host memory"
            reason = f"{needs} ({sizes(host.parts)}) and has {gigabytes(plan.host_bytes)}"
            found.setdefault(host.group, MemoryProblem(key, reason, way_out, certain=True))
    return list(found.values())


def _of_devices(
    peaks: Sequence[DevicePeak], hosts: Sequence[HostPeak], subject: str, memory: int | None
) -> list[MemoryProblem]:
    """The problem of devices that together have so much memory, and of `hosts` that have no other."""
    parts: dict[str, int] = {}
    for name, size in chain(*(peak.parts for peak in peaks), *(host.parts for host in hosts)):
        parts[name] = parts.get(name, 0) + size
    certain, may_add = sum(parts.values()), sum(peak.may_add for peak in peaks)
    if memory is None or certain + may_add <= memory:
        return []
    needs = f"{subject} would need {gigabytes(certain)}"
    phases = " or ".join(sorted({peak.phase for peak in peaks if peak.parts}))
    if certain > memory:
        key, way_out = {**LARGEST, **LARGEST_ON_HOST}.get(max(parts, key=lambda name: parts[name]), RANKS)
        if not hosts and "KV cache" in parts and parts.keys() & {"gradients", "optimizer"}:  # both sides are there
            way_out = f"{way_out}, or {RELEASE if phases == TRAINS else PUT_AWAY}"
        reason = f"{needs} in phase {phases} ({sizes(list(parts.items()))}) and has {gigabytes(memory)}"
        return [MemoryProblem(key, reason, way_out, certain=True)]
    reason = f"{needs}, and up to {gigabytes(may_add)} more for a full micro-batch, and has {gigabytes(memory)}"
    return [MemoryProblem(TOKENS[0], reason, TOKENS[1], certain=False)]
