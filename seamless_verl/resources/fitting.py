"""Whether a plan's memory fits its devices, in words that name what is largest and how to lessen it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from seamless_verl.resources.plan import DevicePeak, Plan

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
class Misfit:
    """One device, or one host, whose memory is too small; `certain` unless only for the longest micro-batch."""

    key: str
    reason: str
    way_out: str
    certain: bool


def misfits(plan: Plan) -> list[Misfit]:
    """At most one for each group of machines, or one for a host whose devices share its memory."""
    if plan.device_bytes is None:
        return []
    if plan.shared_memory:
        found = [_judge(plan.memory, "all devices together", plan.device_bytes)]
    else:
        found = [_judge([peak], f"a device of group {group}", plan.device_bytes) for group, peak in _fullest(plan)]
    return [misfit for misfit in found if misfit is not None]


def gigabytes(size: int) -> str:
    return f"{size / 10**9:.1f} GB"


def _fullest(plan: Plan) -> Iterator[tuple[str, DevicePeak]]:
    groups = {device.number: device.group for device in plan.devices}
    for name in dict.fromkeys(groups.values()):
        yield name, max((p for p in plan.memory if groups[p.device] == name), key=lambda p: p.peak.bound)


def _judge(peaks: Sequence[DevicePeak], where: str, memory: int) -> Misfit | None:
    certain = sum(peak.peak.certain for peak in peaks)
    may_add = sum(peak.may_add for peak in peaks)
    if certain + may_add <= memory:
        return None
    needs = f"{where} would need {gigabytes(certain)}"
    parts: dict[str, int] = {}
    for name, size in (part for peak in peaks for part in peak.parts):
        parts[name] = parts.get(name, 0) + size
    detail = ", ".join(f"{name} {gigabytes(size)}" for name, size in sorted(parts.items(), key=lambda p: -p[1]))
    phases = " or ".join(sorted({peak.phase for peak in peaks if peak.parts}))
    if certain > memory:
        key, way_out = LARGEST.get(max(parts, key=lambda name: parts[name]), RANKS)
        reason = f"{needs} in phase {phases} ({detail}) and has {gigabytes(memory)}"
        return Misfit(key, reason, way_out, certain=True)
    reason = f"{needs}, and up to {gigabytes(may_add)} more for a full micro-batch, and has {gigabytes(memory)}"
    return Misfit(TOKENS[0], reason, TOKENS[1], certain=False)
