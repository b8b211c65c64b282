"""Keeps vLLM's weights where they are, so that weights can be loaded into a running engine on the host.

On the host vLLM packs each Linear weight for oneDNN and drops the original, so that a later load has nothing to load
into. Here the original stays beside its packed copy: `load_weights` writes into it, and
`process_weights_after_loading`, which verl runs after the last bucket, packs it again. This takes one more copy of the
Linear weights. Multiplying by the unpacked ones would save it, but is 1.1 to 4 times slower above a width of 256.

A load of staged weights frees all packed copies before it makes new ones. With each old copy beside its new one, as
vLLM does it, most new ones were in memory that the process did not have yet, and page faults took as long as the
packing.

A mixture's experts are packed where they are: the same memory has their weights while they are loaded, and packed ones
while they are used. vLLM packs them once, so that an engine would compute with the plain weights of a later load as if
they were packed, without a word; and 0.24 makes a new parameter each time, which has no loader and fits no load plan.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

import torch
from vllm.model_executor.utils import replace_parameter

from seamless_verl.platform.adaptation import KEEP_WEIGHTS, PACKED_EXPERTS

MULTIPLY = "cpu_linear"  # the layer's attribute that vLLM calls for its product
UNPACKED = torch.nn.functional.linear  # its value in a layer that is not packed


def keep_weights() -> None:
    """Make every later packing in this process keep the weight it packs, or its place; may be called again.

    Raises:
        HostMovedError: vLLM has moved its packing.
    """
    pack = cast(Any, KEEP_WEIGHTS.verify())
    if hasattr(pack, "__wrapped__"):
        return

    @functools.wraps(pack)
    def pack_and_keep(layer: Any, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    # Its callers import the name at each call, so the module's own attribute is the only one there is.
    vars(sys.modules[pack.__module__])[pack.__name__] = pack_and_keep
    pack_experts_after_each_load()


def pack_experts_after_each_load() -> None:
    """Make vLLM pack a mixture's experts after every load, and write them to where the weights are."""
    setup = cast(Any, PACKED_EXPERTS.verify())
    if hasattr(setup, "__wrapped__"):
        return

    @functools.wraps(setup)
    def setup_and_pack(self: Any, *args: Any, **kwargs: Any) -> None:
        is_loaded_again = self.moe_kernel is not None
        setup(self, *args, **kwargs)
        if is_loaded_again:
            self.moe_kernel.fused_experts.process_weights_after_loading(args[0] if args else kwargs["layer"])

    vars(sys.modules[setup.__module__])["UnquantizedFusedMoEMethod"]._setup_kernel = setup_and_pack
    try:  # vLLM 0.24, which packs after every load
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe as experts
    except ImportError:  # 0.29
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe as experts
    experts.replace_parameter = functools.partial(replace_parameter, prefer_copy=True)


def free_packed_weights(model: torch.nn.Module) -> None:
    """Free the packed copies of its Linear weights, before all are packed again.

    A layer that is used before that packs its weight then.
    """
    for layer in model.modules():
        if vars(layer).get(MULTIPLY, UNPACKED) is not UNPACKED:
            setattr(layer, MULTIPLY, functools.partial(pack_and_multiply, layer))


def pack_and_multiply(layer: Any, *operands: Any) -> Any:
    cast(Any, KEEP_WEIGHTS.verify())(layer, remove_weight=False)
    return getattr(layer, MULTIPLY)(*operands)
