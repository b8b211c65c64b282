"""What published figures of an accelerator and a model's sizes say of a simulated machine that nobody has measured.

A unit is a replica of some devices, with as many ranks of the trainer. Its times, for P parameters that a token passes:

- decoding step: the weights are read once, and the cache of every token in context once; or 2 P operations a token,
  whichever takes longer (Pope et al. 2022, arXiv 2211.05102, section 2), plus STEP_S for launches and collectives;
- reading a context: 2 P operations a token;
- training: 6 P operations a token, 8 P where activations are computed again, and attention's 6 x layers x hidden x
  length / 2 (Narayanan et al. 2021, arXiv 2104.04473, section 5.1, and Korthikanti et al. 2022, arXiv 2205.05198);
- hand-over and weight update: the weights go over the host's bus.

The peaks are the makers' (see `Accelerator`). How much of a peak is reached is assumed, but for training: 41% to 48% of
H100's peak is what Megatron-LM reports for models of 2B to 462B (README, "Training Speed and Scalability").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seamless_verl.errors import ConfigError
from seamless_verl.resources.model_facts import ModelFacts
from seamless_verl.tools.simulator.machine import MachineProfile

TRAIN_SHARE, PREFILL_SHARE, MEMORY_SHARE = 0.4, 0.5, 0.6  # of the peaks; only the first is published
STEP_S = 3e-3
HOST_S, DISPATCH_S, CALL_S, COLLECT_S = 1.0, 0.1, 0.05, 0.05  # assumed
WEIGHT_BYTES = 2
CALLS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
ASSUMED = (
    f"{PREFILL_SHARE:.0%} of the operations when contexts are read, {MEMORY_SHARE:.0%} of the memory's bandwidth",
    f"{STEP_S * 1e3:g} ms a decoding step for launches, {HOST_S:g} s of the host's work a mini-batch",
    f"{TRAIN_SHARE:.0%} of the operations when training",
)


@dataclass(frozen=True)
class Accelerator:
    """Peaks of one device: dense bfloat16 operations/s, bytes/s of its memory and of its host bus, bytes of memory."""

    operations: float
    memory_bandwidth: float
    host_bandwidth: float
    memory: float
    source: str


ACCELERATORS: Mapping[str, Accelerator] = {
    "a100": Accelerator(312e12, 2.039e12, 25e9, 80e9, "NVIDIA A100 80GB SXM data sheet, 2021"),
    "h100": Accelerator(989e12, 3.35e12, 50e9, 80e9, "NVIDIA H100 SXM data sheet, 2023 (dense)"),
    "h200": Accelerator(989e12, 4.8e12, 50e9, 141e9, "NVIDIA H200 SXM data sheet, 2023 (dense)"),
    "h800": Accelerator(989e12, 3.35e12, 50e9, 80e9, "DeepSeek-V3 report (arXiv 2412.19437), as H100 but for NVLink"),
}
"""The bandwidths of the host bus are assumed: somewhat less than PCIe's nominal 32 and 64 GB/s."""


def accelerator_named(name: str) -> Accelerator:
    """Raises ConfigError with the names there are."""
    if name not in ACCELERATORS:
        raise ConfigError("--device", name, "no figures of it are here", f"Choose one of {sorted(ACCELERATORS)}")
    return ACCELERATORS[name]


def active_parameters(model: ModelFacts) -> int:
    """Parameters that one token passes; of a mixture, its own experts'."""
    experts = model.moe_layers * (model.shared + model.experts)
    return model.parameters - experts + model.moe_layers * 3 * model.hidden * model.mlp_width


@dataclass(frozen=True)
class Lengths:
    """Tokens of a sequence on the mean, for attention in training, and whether activations are computed again."""

    mean: float
    recompute: bool = False


def machine_of(device: Accelerator, model: ModelFacts, unit: int, lengths: Lengths, *, updates: int) -> MachineProfile:
    """The times of a unit of so many devices."""
    active, weights = active_parameters(model), WEIGHT_BYTES * model.parameters
    read = unit * device.memory_bandwidth * MEMORY_SHARE
    operations = (8 if lengths.recompute else 6) * active + 3 * model.layers * model.hidden * lengths.mean
    load_s = weights / unit / device.host_bandwidth
    steps = {
        calls: STEP_S + max(WEIGHT_BYTES * active_read(model, calls) / read, 2 * active * calls / _peak(device, unit))
        for calls in CALLS
    }
    return MachineProfile(
        rates={calls: calls / seconds for calls, seconds in steps.items()},
        context_token_s=WEIGHT_BYTES * model.cache_width * model.layers / read,
        prefill_token_s=2 * active / _peak(device, unit),
        train_token_s=operations / (unit * device.operations * TRAIN_SHARE),
        switch_to_rollout_s=load_s,
        switch_to_train_s=0.5,
        sync_s=0.5 + weights / (8 * device.host_bandwidth),
        load_s=load_s,
        host_s=HOST_S / updates,
        dispatch_s=DISPATCH_S,
        call_s=CALL_S,
        collect_s=COLLECT_S,
    )


def active_read(model: ModelFacts, calls: int) -> float:
    """Parameters that a decoding step reads: all of a dense model, of a mixture as many experts as calls choose."""
    return min(float(model.parameters), float(active_parameters(model)) * calls)


def seats_of(device: Accelerator, model: ModelFacts, unit: int, *, context: float, share: float, most: int) -> int:
    """Calls that a replica's cache holds at so many tokens each, with `share` of its memory for weights and cache."""
    cache = share * device.memory * unit - WEIGHT_BYTES * model.parameters
    per_call = WEIGHT_BYTES * model.cache_width * model.layers * context
    return max(0, min(most, int(cache / per_call)))


def _peak(device: Accelerator, unit: int) -> float:
    return unit * device.operations * PREFILL_SHARE
