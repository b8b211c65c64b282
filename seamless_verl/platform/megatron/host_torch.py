"""A substitute for the global `torch` of Megatron's modules, in which "cuda" means the host.

Megatron writes `device="cuda"` and `torch.cuda.current_device()` where it means "the accelerator". Giving those modules
a `torch` of their own leaves the real one untouched for all other modules, which patching `torch.cuda` would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from seamless_verl.platform.host_device import HOST_DEVICE

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
