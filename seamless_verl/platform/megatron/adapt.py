"""Adapts Megatron-core, mbridge and, for them, torch to the host: every change that the CPU platform makes to them.

`adapt_megatron` is called in a training process before a model is built. It may be called again, since Megatron imports
some of its modules lazily.

Megatron writes `device="cuda"` and `torch.cuda.current_device()` where it means "the accelerator". Its modules get a
global `torch` of their own (`HostTorch`), in which "cuda" means the host. That leaves the real one untouched for all
other modules, which patching `torch.cuda` would not.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from seamless_verl.platform.adaptation import TENSOR_TYPES, use_host_types
from seamless_verl.platform.host_device import HOST_DEVICE
from seamless_verl.platform.megatron.engines import use_torch_layers

HOST = torch.device("cpu")
FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "as_tensor", "device")


def on_host(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a tensor factory so that a device named "cuda" is the host."""

    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = HOST
        return factory(*args, **kwargs)

    return make


def host_device_of(*args: Any, **kwargs: Any) -> torch.device:
    """`torch.device(...)`, except that an accelerator is the host."""
    named = str(args[0] if args else kwargs.get("type", ""))
    return HOST if named.startswith("cuda") else torch.device(*args, **kwargs)


class EveryGenerator(dict[Any, torch.Generator]):
    """The host has one generator, whatever device it is asked for."""

    def __missing__(self, device: Any) -> torch.Generator:
        return torch.default_generator


class HostCuda(ModuleType):
    """What Megatron finds under `torch.cuda`."""

    default_generators = EveryGenerator()
    random = HOST_DEVICE  # get_rng_state and set_rng_state, of any "device"

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(HOST_DEVICE, name)
        except AttributeError:
            return getattr(torch.cuda, name)  # classes and decorators, which need no device

    def current_device(self) -> torch.device:
        return HOST

    def is_available(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)


class HostTorch(ModuleType):
    """`torch` with host factories and a host `torch.cuda`; everything else is torch's own."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = HostCuda("torch.cuda")
        self.device = host_device_of
        for name in FACTORIES[:-1]:
            setattr(self, name, on_host(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


HOST_TORCH = HostTorch()


def give_host_torch(modules: Iterable[ModuleType]) -> list[str]:
    """Replace the global `torch` of these modules by the substitute; returns the names of those changed."""
    changed = []
    for module in modules:
        if module.__dict__.get("torch") is torch:
            module.torch = HOST_TORCH  # type: ignore[attr-defined]
            changed.append(module.__name__)
    return changed


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
        use_host_types(adaptation.find(), adaptation)
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


PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
SLOW = ("NO AVX", "AVX2")  # of torch.backends.cpu.get_cpu_capability


@cache
def multiply_bf16_in_fp32() -> torch.library.Library | None:
    """Replace torch's kernels for products of bf16 in this process, once, on a processor that needs it.

    oneDNN multiplies bf16 from AVX-512 on. Without it torch 2.11 and 2.13 do so in a plain loop: 917 ms for [2048, 256]
    by [256, 1024] on one core with AVX2, where fp32 takes 16 ms and the casts 0.3 ms. So they are multiplied in fp32
    and the result is rounded to bf16, which is also what oneDNN does: it sums in fp32. Other products run torch's own
    kernels through the variants that write into a given tensor, which are operators of their own.

    They last as long as the library that is returned, which the cache keeps.
    """
    if torch.backends.cpu.get_cpu_capability() not in SLOW:
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
        for name in PRODUCTS:
            library.impl(name, product(getattr(torch.ops.aten, name).out), "CPU")
    return library


def product(into: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The product that `into` writes to `out`: [n, m], or [b, n, m] in a batch. Its last two operands are matrices."""

    def multiply(*operands: Tensor, **scales: Any) -> Tensor:
        dtype = operands[-1].dtype
        if all(operand.dtype is torch.bfloat16 for operand in operands):  # torch refuses a mixture
            operands = tuple(operand.float() for operand in operands)
        left, right = operands[-2:]
        out = left.new_empty(*left.shape[:-1], right.shape[-1])
        return into(*operands, **scales, out=out).to(dtype)

    return multiply
