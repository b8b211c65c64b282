"""Adapts Megatron-core and mbridge to the host: every change that the CPU platform makes to them.

What has to do with Transformer Engine alone is in `without_te.py`, and serves accelerators too.

`adapt_megatron` is called in a training process before a model is built. It may be called again, since Megatron imports
some of its modules lazily.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from seamless_verl.platform.adaptation import Adaptation
from seamless_verl.platform.megatron.host_torch import give_host_torch
from seamless_verl.platform.megatron.tensor_types import use_host_types
from seamless_verl.platform.megatron.without_te import SPEC_PROVIDER, use_torch_layers

MCORE = "megatron-core 0.16.1"

HOST_TORCH = Adaptation(
    "megatron-host-torch",
    "megatron.core.tensor_parallel.layers:torch",
    MCORE,
    'modules of megatron and mbridge say device="cuda" where they mean the accelerator',
)
RNG_NOW = Adaptation(
    "megatron-rng-now",
    "megatron.core.tensor_parallel.random:_lazy_call",
    MCORE,
    "setting the random state is queued until CUDA is initialised, which never happens on a host",
    "(callable, **kwargs)",
)
TENSOR_TYPES = tuple(
    Adaptation("megatron-tensor-types", symbol, MCORE, 'it compares Tensor.type() with "torch.cuda.FloatTensor"')
    for symbol in (
        "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._build_model_and_main_param_groups",
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
        "megatron.core.optimizer.clip_grads:clip_grad_by_total_norm_fp32",
    )
)
MODULE_ON_HOST = Adaptation(
    "megatron-module-on-host",
    "megatron.core.transformer.module:MegatronModule.cuda",
    MCORE,
    "bridges move a built model to the accelerator by model.cuda(device)",
    "(self, device: int | torch.device | None = None) -> Self",
)
PIN_MEMORY = Adaptation(
    "host-pin-memory",
    "torch:Tensor.pin_memory",
    "torch 2.13.0",
    "verl pins the copies of the weights it keeps (`separate_async`), which torch refuses without an accelerator",
)
ADAPTATIONS = (HOST_TORCH, RNG_NOW, *TENSOR_TYPES, SPEC_PROVIDER, MODULE_ON_HOST, PIN_MEMORY)


def call_now(callback: Callable[[], Any], **_: Any) -> None:
    """Run what `torch.cuda._lazy_call` would have queued."""
    callback()


def adapt_megatron() -> None:
    """Let Megatron-core and mbridge, as imported in this process, run on the host.

    Raises:
        HostMovedError: Megatron has moved what an adaptation touches.
    """
    use_torch_layers()
    for adaptation in TENSOR_TYPES:
        use_host_types(
            adaptation.find(), adaptation=adaptation.name, symbol=adaptation.symbol, written_for=adaptation.written_for
        )
    set_random_states_immediately()
    keep_modules_on_host()
    if importlib.util.find_spec("mbridge"):
        importlib.import_module("mbridge")  # verl imports it only while it builds the model
    give_host_torch(megatron_modules())


def set_random_states_immediately() -> None:
    """Apply Megatron's random states to the host's generator when they are set, not when CUDA starts."""
    import megatron.core.tensor_parallel.random as rng

    rng._lazy_call = call_now
    # Each fork warns that the host's state changed with the device's: here they are the same state.
    logging.getLogger(rng.__name__).setLevel(logging.ERROR)


def megatron_modules() -> list[Any]:
    """The modules of megatron and mbridge that this process has imported."""
    return [m for name, m in list(sys.modules.items()) if name.split(".")[0] in ("megatron", "mbridge") and m]


def keep_modules_on_host() -> None:
    """Make `cuda()` of Megatron's own modules, and `pin_memory()`, return the same object."""
    from megatron.core.transformer.module import MegatronModule

    def cuda(self: Any, device: Any = None) -> Any:
        return self

    MegatronModule.cuda = cuda
    torch.Tensor.pin_memory = cuda  # type: ignore[method-assign]  # host memory is where it is
