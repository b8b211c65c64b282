"""What a simulated machine takes for its work: as measured, or as an accelerator's published figures and a model say.

Of an accelerator that nobody has measured, a unit is a replica of some devices, with as many ranks of the trainer. Its
times, for P parameters that a token passes:

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

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from seamless_verl.errors import ConfigError
from seamless_verl.resources.model_facts import ModelFacts

T = TypeVar("T")
ONE_CORE: Mapping[int, float] = {1: 475, 2: 868, 4: 1566, 8: 2536, 16: 3880, 32: 7014, 64: 8431}
"""Tokens/s at c calls in flight: a model of 3.3M parameters, one engine on one core."""


@dataclass(frozen=True)
class MachineProfile:
    """All times are in seconds; by default the host's work does not take the devices' time."""

    rates: Mapping[int, float] = field(default_factory=lambda: ONE_CORE)  # tokens/s of an engine, by running calls
    rates_context: float = 0.0  # tokens that the conversations of these calls have
    context_token_s: float = 0.0  # of a decoding step, for each further token in the context of a call
    train_token_s: float = 2.9 / 8044  # device-seconds, prompts included
    train_row_s: float = 0.0  # device-seconds of a sequence
    train_sync_s: float = 0.0  # of every step where several devices train together
    shares_prompts: bool = False  # training computes a group's prompt once, as with seamless.shared_prefixes=auto
    switch_to_rollout_s: float = 0.01
    switch_to_train_s: float = 0.01
    sync_s: float = 0.1  # a weight update: no device works; where it is rolling, only the trainer waits
    host_s: float = 0.04  # the host's work on a mini-batch before devices compute
    dispatch_s: float = 0.05  # from a prompt's submission to its first call
    call_s: float = 0.0  # from a tool's end to the next call
    collect_s: float = 0.02  # from a group's end until it is ready
    prefill_token_s: float = 0.05e-3  # of a context that is computed, or of a cut call's that is computed again
    # The host's work where cores are the devices: front ends, agent loops, queues. One process at a time does it.
    host_token_s: float = 0.0  # of a generated token
    host_sample_s: float = 0.0  # of an ended sample; they are ready in their order
    load_s: float = 0.0  # for which each engine stops in a rolling weight update

    @property
    def host_shares(self) -> bool:
        """Whether the host's work is done on the devices' cores."""
        return self.host_token_s > 0 or self.host_sample_s > 0

    def train_s(self, tokens: int, rows: int, repeated: int) -> float:
        """Device-seconds of training that many tokens in that many sequences, without what a mini-batch takes.

        `repeated` of the tokens are prompts that another sequence of their group has too.
        """
        computed = tokens - repeated if self.shares_prompts else tokens
        return computed * self.train_token_s + rows * self.train_row_s

    def rate(self, calls: int) -> float:
        """Tokens/s of one engine, from the seconds per decoding step, interpolated linearly."""
        return calls / self.decode_s(calls) if calls else 0.0

    def decode_s(self, calls: int) -> float:
        """Seconds in which each of `calls` gets one token."""
        points = [(c, c / rate) for c, rate in sorted(self.rates.items())]
        after = bisect_left(points, (calls, 0.0))
        right = min(max(after, 1), len(points) - 1)
        (c0, s0), (c1, s1) = points[right - 1], points[right]
        return s0 + (s1 - s0) * (calls - c0) / (c1 - c0)


TWO_CORES = MachineProfile(
    rates_context=40,
    context_token_s=0.17e-6,
    train_token_s=0.245e-3,
    train_row_s=6.8e-3,
    train_sync_s=0.1,
    load_s=0.017,
    host_s=0.1,
    dispatch_s=0.35,
    call_s=0.35,
    host_token_s=0.173e-3,
    host_sample_s=7.4e-3,
)
"""Two cores as two devices. Where each number is from is in the simulator's README; only the 0.35 s are fitted."""

H800_8B = MachineProfile(
    rates={1: 89.69, 2: 179.4, 4: 358.7, 8: 717.5, 16: 1435, 32: 2870, 64: 5740, 128: 11480, 256: 22298},
    context_token_s=73.36e-9,
    train_token_s=168.4e-6,
    switch_to_rollout_s=0.328,
    switch_to_train_s=0.5,
    sync_s=0.541,
    load_s=0.328,
    host_s=1.0,
    dispatch_s=0.1,
    call_s=0.05,
    collect_s=0.05,
    prefill_token_s=33.1e-6,
)
"""One H800 as a device, for Qwen3-8B with 2,500 tokens a sequence, as `machine_of` has it."""

MACHINES: Mapping[str, MachineProfile] = {
    "devices": replace(TWO_CORES, dispatch_s=0.05, call_s=0.05, host_token_s=0.0, host_sample_s=0.0),
    "two_cores": TWO_CORES,
    "h800_8b": H800_8B,
}


def named(table: Mapping[str, T], name: str, what: str, reason: str = "") -> T:
    """The entry of that name; raises ConfigError with the names there are. `what` is the key in the message."""
    if name not in table:
        raise ConfigError(what, name, reason or f"there is no such {what}", f"Choose one of {sorted(table)}")
    return table[name]


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


def active_parameters(model: ModelFacts) -> int:
    """Parameters that one token passes; of a mixture, its own experts'."""
    experts = model.moe_layers * (model.shared + model.experts)
    return model.parameters - experts + model.moe_layers * 3 * model.hidden * model.mlp_width


def machine_of(
    device: Accelerator, model: ModelFacts, unit: int, *, length: float, recompute: bool = False
) -> MachineProfile:
    """The times of a unit of so many devices.

    `length` is the mean of a sequence's tokens; `recompute` is whether training computes activations again.
    """
    active, weights = active_parameters(model), WEIGHT_BYTES * model.parameters
    read = unit * device.memory_bandwidth * MEMORY_SHARE
    peak = unit * device.operations * PREFILL_SHARE
    operations = (8 if recompute else 6) * active + 3 * model.layers * model.hidden * length
    load_s = weights / unit / device.host_bandwidth
    steps = {}
    for calls in CALLS:  # a step reads all of a dense model, of a mixture as many experts as calls choose
        read_bytes = WEIGHT_BYTES * min(model.parameters, active * calls)
        steps[calls] = STEP_S + max(read_bytes / read, 2 * active * calls / peak)
    return MachineProfile(
        rates={calls: calls / seconds for calls, seconds in steps.items()},
        context_token_s=WEIGHT_BYTES * model.cache_width * model.layers / read,
        prefill_token_s=2 * active / peak,
        train_token_s=operations / (unit * device.operations * TRAIN_SHARE),
        switch_to_rollout_s=load_s,
        switch_to_train_s=0.5,
        sync_s=0.5 + weights / (8 * device.host_bandwidth),
        load_s=load_s,
        host_s=HOST_S,
        dispatch_s=DISPATCH_S,
        call_s=CALL_S,
        collect_s=COLLECT_S,
    )


def seats_of(device: Accelerator, model: ModelFacts, unit: int, *, context: float, share: float, most: int) -> int:
    """Calls that a replica's cache holds at so many tokens each, with `share` of its memory for weights and cache."""
    cache = share * device.memory * unit - WEIGHT_BYTES * model.parameters
    per_call = WEIGHT_BYTES * model.cache_width * model.layers * context
    return max(0, min(most, int(cache / per_call)))
