"""verl's two FSDP engines on the host, on the core of the process's device; torch shards over gloo as it is.

Only torch's second FSDP: the first synchronizes a module's states on an accelerator alone.
"""

from __future__ import annotations

from typing import Any

from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from seamless_verl.platform.megatron.adapt import multiply_bf16_in_fp32
from seamless_verl.platform.megatron.host_engines import pin_to_device


class OnHost:
    """What the host adds to an engine: fast products of bf16, and the core of its device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        multiply_bf16_in_fp32()
        pin_to_device()
        super().__init__(*args, **kwargs)


class HostFSDPEngine(OnHost, FSDPEngineWithLMHead):
    """FSDP's language model engine on the host."""


class HostFSDPValueEngine(OnHost, FSDPEngineWithValueHead):
    """FSDP's value model engine on the host."""
