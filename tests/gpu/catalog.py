"""The checks in the order in which they run, as data; imports nothing of the stack."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One check. `target` is `module:function`; `gigabytes` (10^9) is the card's memory below which it is skipped."""

    name: str
    target: str
    limit_s: int
    gigabytes: int
    what: str


CHECKS = (
    Check("environment", "gpu.environment:check", 90, 1, "versions, card, vLLM's kernels, a matrix product"),
    Check("engine", "gpu.engine:check_requests", 150, 8, "generate with CUDA graphs, keep-pause, abort and continue"),
    Check("engine-sleep", "gpu.engine:check_sleep", 150, 8, "sleep levels 1 and 2: memory freed, taken back, times"),
    Check("engine-load", "gpu.engine:check_load", 150, 8, "staged weights loaded in place, logprobs before and after"),
    Check(
        "attention", "gpu.megatron:check_attention", 60, 8, "packed sequences and forests in one kernel, and one by one"
    ),
    Check("megatron", "gpu.megatron:check_training", 240, 12, "log-probabilities, four updates, export, resume"),
    Check("logprobs", "gpu.megatron:check_agreement", 180, 12, "vLLM's and Megatron's logprobs in bf16"),
    Check("run-resident", "gpu.runs:check_resident", 300, 20, "five steps, handover=resident: times, peaks, NVML"),
    Check("run-cache-only", "gpu.runs:check_cache_only", 300, 20, "five steps, handover=cache_only: the same"),
    Check("run-released", "gpu.runs:check_released", 300, 20, "five steps, handover=released: the same"),
    Check("memory", "gpu.megatron:check_memory", 150, 20, "the memory estimate against torch.cuda's peak"),
    Check("bandwidth", "gpu.bandwidth:check", 400, 8, "staging and loading of 0.6B to 8B shapes"),
    Check("gateway", "gpu.gateway:check", 180, 8, "64 agents on the gateway over one engine"),
    Check("modes", "gpu.runs:check_modes", 900, 20, "seamless beside verl's sync and colocate_async"),
)


def find(target: str) -> Callable[..., Any]:
    """The function of a check; ImportError or AttributeError where it is not there."""
    module, _, function = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def named(names: list[str]) -> tuple[Check, ...]:
    """These checks in their order; all for an empty list. LookupError names one that is unknown."""
    known = {check.name for check in CHECKS}
    if unknown := sorted(set(names) - known):
        raise LookupError(f"--only {unknown[0]}: no such check. Choose among {', '.join(sorted(known))}")
    return tuple(check for check in CHECKS if not names or check.name in names)
