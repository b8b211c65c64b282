"""Adapts Megatron-core, its bridges and, for them, torch to the host: every change that the CPU platform makes to them.

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

from seamless_verl.platform.adaptation import (
    BRIDGE_SCATTER,
    TENSOR_TYPES,
    TOKEN_COUNTS,
    UNEVEN_PARTS,
    use_host_types,
)
from seamless_verl.platform.host_device import HOST_DEVICE
from seamless_verl.platform.megatron.bridge import BRIDGE

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


class HostStream(torch.cpu.Stream):
    """torch's stream of the host, whose events are torch's own; there `record_event` returns none."""

    def record_event(self) -> torch.cpu.Event:  # type: ignore[override]
        return torch.cpu.Event()


class HostCuda(ModuleType):
    """What Megatron finds under `torch.cuda`."""

    Stream = HostStream  # of a mixture's token dispatcher, which waits for its events

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
    """Let Megatron-core and its bridges, as imported in this process, run on the host.

    Raises:
        HostMovedError: Megatron has moved what an adaptation touches.
    """
    from seamless_verl.platform.megatron.layers import use_torch_layers  # which imports Megatron

    use_torch_layers()
    for adaptation in TENSOR_TYPES:
        use_host_types(adaptation.find(), adaptation)
    count_tokens_on_host()
    exchange_uneven_parts()
    set_random_states_immediately()
    keep_modules_on_host()
    if importlib.util.find_spec("mbridge"):
        importlib.import_module("mbridge")  # verl imports it only while it builds the model
    if BRIDGE in sys.modules:
        scatter_copies()
    give_host_torch(megatron_modules())


def scatter_copies() -> None:
    """Have Megatron-Bridge scatter contiguous copies of a weight's parts, once in this process."""
    scatter: Any = BRIDGE_SCATTER.verify()
    if hasattr(scatter, "__wrapped__"):
        return

    @wraps(scatter)
    def scatter_contiguous(self: Any, splits: Any, *args: Any, **kwargs: Any) -> Any:
        return scatter(self, splits and [part.contiguous() for part in splits], *args, **kwargs)

    sys.modules[scatter.__module__].MegatronParamMapping.scatter_to_tp_ranks = scatter_contiguous  # type: ignore[attr-defined]


def count_tokens_on_host() -> None:
    """Give a mixture's dispatcher the numbers of tokens that it sends to each rank as it gets them from a device."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    if TOKEN_COUNTS.find() is not token_counts:
        TOKEN_COUNTS.verify()
    dispatcher.maybe_move_tensor_to_cpu = token_counts


def token_counts(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """The tensor, or as a numpy array. What is no tensor stays what it is."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def exchange_uneven_parts() -> None:
    """Let ranks over gloo gather and scatter parts of different lengths, as the experts that they share need it."""
    import megatron.core.tensor_parallel.mappings as mappings

    if hasattr(mappings._gather_along_first_dim, "__wrapped__"):
        return
    gather, scatter = (one.verify() for one in UNEVEN_PARTS)
    mappings._gather_along_first_dim = by_length(gather, gather_uneven)
    mappings._reduce_scatter_along_first_dim = by_length(scatter, reduce_scatter_uneven)


def by_length(even: Any, uneven: Callable[[Tensor, Any, list[int]], Tensor]) -> Callable[..., Tensor]:
    """Megatron's exchange of equal parts; `uneven` where their lengths are given."""

    @wraps(even)
    def share(rows: Tensor, group: Any, lengths: list[int] | None = None, use_global_buffer: bool = False) -> Tensor:
        return even(rows, group, None, use_global_buffer) if lengths is None else uneven(rows, group, lengths)  # type: ignore[no-any-return]

    return share


def gather_uneven(rows: Tensor, group: Any, lengths: list[int]) -> Tensor:
    """[n, ...] of each rank, with the n of all, to [sum of n, ...]."""
    parts = [rows.new_empty(max(lengths), *rows.shape[1:]) for _ in lengths]
    padded = torch.zeros_like(parts[0])
    padded[: len(rows)] = rows
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([one[:length] for one, length in zip(parts, lengths, strict=True)])


def reduce_scatter_uneven(whole: Tensor, group: Any, lengths: list[int]) -> Tensor:
    """[sum of n, ...] of each rank, to this rank's [n, ...] of their sum."""
    total = whole.clone()
    torch.distributed.all_reduce(total, group=group)
    return total.split(lengths)[group.rank()].contiguous()


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
