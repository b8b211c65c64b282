"""Checks whether a plan's memory fits its devices, and reads this machine's memory without torch.

A problem names the largest part and the setting that lessens it. Sizes are in bytes.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from seamless_verl.resources.plan import DevicePeak, Plan

MEMINFO = Path("/proc/meminfo")
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
QUERY = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")


def host_bytes(meminfo: Path = MEMINFO, limits: tuple[Path, ...] = LIMITS) -> int | None:
    """The host's memory, or a container's share of it; None when the system does not say."""
    if not meminfo.is_file():
        return None
    found = re.search(r"^MemTotal:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    total = int(found.group(1)) * 1024 if found else None
    given = [int(text) for path in limits if path.is_file() and (text := path.read_text().strip()).isdigit()]
    return min([*([total] if total else []), *given], default=None)


def accelerator_bytes() -> int | None:
    """The least memory of an accelerator in this machine; None when its driver does not say."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        done = subprocess.run([command, *QUERY], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None  # the driver does not respond
    sizes = [int(line) for line in done.stdout.split() if line.isdigit()]
    return min(sizes) * 2**20 if done.returncode == 0 and sizes else None


ENGINE, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
TENSOR = f"{ACTOR}.megatron.tensor_model_parallel_size"
CACHE = (f"{ENGINE}.gpu_memory_utilization", "Lower it, or give the cache bytes: engine_kwargs.vllm")
TOKENS = (f"{ACTOR}.ppo_max_token_len_per_gpu", "Lower it, or set recompute_granularity=full")
RANKS = (TENSOR, "Raise it or the pipeline's, give train more devices, or offload the optimizer and parameters")
LARGEST = {
    "KV cache": CACHE,
    "engine weights": (f"{ENGINE}.tensor_model_parallel_size", "Raise it"),
    "buckets": (f"{ENGINE}.checkpoint_engine.update_weights_bucket_megabytes", "Lower it"),
    "activations": ("data.max_response_length", "Lower it, or raise the tensor or context parallel size"),
    "processes": ("seamless.device_memory_gb", "Use fewer devices, or a machine with more memory"),
    "critic": ("critic.megatron.tensor_model_parallel_size", "Raise it, or use a smaller critic"),
}


@dataclass(frozen=True)
class MemoryProblem:
    """One device, or one host, whose memory is too small; `certain` unless only for the longest micro-batch."""

    key: str
    reason: str
    way_out: str
    certain: bool


def memory_problems(plan: Plan) -> list[MemoryProblem]:
    """At most one for each group of machines, or one for a host whose devices share its memory."""
    if plan.device_bytes is None:
        return []
    if plan.shared_memory:
        found = [_find_problem(plan.memory, "all devices together", plan.device_bytes)]
    else:
        found = [
            _find_problem([peak], f"a device of group {group}", plan.device_bytes) for group, peak in _fullest(plan)
        ]
    return [problem for problem in found if problem is not None]


def gigabytes(size: int) -> str:
    return f"{size / 10**9:.1f} GB"


def _fullest(plan: Plan) -> Iterator[tuple[str, DevicePeak]]:
    groups = {device.number: device.group for device in plan.devices}
    for name in dict.fromkeys(groups.values()):
        yield name, max((p for p in plan.memory if groups[p.device] == name), key=lambda p: p.peak.bound)


def _find_problem(peaks: Sequence[DevicePeak], subject: str, memory: int) -> MemoryProblem | None:
    certain = sum(peak.peak.certain for peak in peaks)
    may_add = sum(peak.may_add for peak in peaks)
    if certain + may_add <= memory:
        return None
    needs = f"{subject} would need {gigabytes(certain)}"
    parts: dict[str, int] = {}
    for name, size in (item for peak in peaks for item in peak.parts):
        parts[name] = parts.get(name, 0) + size
    detail = ", ".join(f"{name} {gigabytes(size)}" for name, size in sorted(parts.items(), key=lambda p: -p[1]))
    phases = " or ".join(sorted({peak.phase for peak in peaks if peak.parts}))
    if certain > memory:
        key, way_out = LARGEST.get(max(parts, key=lambda name: parts[name]), RANKS)
        reason = f"{needs} in phase {phases} ({detail}) and has {gigabytes(memory)}"
        return MemoryProblem(key, reason, way_out, certain=True)
    reason = f"{needs}, and up to {gigabytes(may_add)} more for a full micro-batch, and has {gigabytes(memory)}"
    return MemoryProblem(TOKENS[0], reason, TOKENS[1], certain=False)
