"""Lets Megatron-core build its layers without Transformer Engine, from plain torch: on a host and on an accelerator.

mbridge asks Megatron for Transformer Engine's layers, and Transformer Engine must be compiled for the machine. Nothing
here is about a device; what only a host needs is in `adapt.py`.
"""

from __future__ import annotations

import sys

from seamless_verl.platform.adaptation import Adaptation

SPECS = "megatron.core.models.gpt.gpt_layer_specs"
SPEC_PROVIDER = Adaptation(
    "megatron-spec-provider",
    f"{SPECS}:get_gpt_layer_with_transformer_engine_spec",
    "megatron-core 0.16.1",
    "layers are built from Transformer Engine's provider, a name that does not exist without it",
)


def use_torch_layers() -> None:
    """Give Megatron, in this process, the layers of `layers.py` where it asks for Transformer Engine's.

    Called before a model is built; may be called again.

    Raises:
        HostMovedError: Megatron has moved the function that names the provider.
    """
    import torch

    from seamless_verl.platform.megatron.layers import TorchNorm, TorchSpecProvider

    # torch prefers cuDNN's attention on recent cards, which makes a plan for every new length, and here almost every
    # sequence is one. Flash attention has none.
    torch.backends.cuda.enable_cudnn_sdp(False)

    specs = sys.modules[SPEC_PROVIDER.verify().__module__]
    specs.TESpecProvider, specs.TENorm, specs.HAVE_TE = TorchSpecProvider, TorchNorm, True  # type: ignore[attr-defined]
