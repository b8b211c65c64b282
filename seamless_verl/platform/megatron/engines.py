"""verl's two Megatron engines in plain torch, on any device."""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead

from seamless_verl.platform.megatron.adapters import complete_adapters
from seamless_verl.platform.megatron.bridge import import_bridge
from seamless_verl.platform.megatron.layers import TELayerNormColumnParallelLinear, use_torch_layers
from seamless_verl.platform.megatron.shared_prefixes import SharesPrefixes, SharesValues


class TorchEngineMixin:
    """What an engine needs without Transformer Engine: its layers, and the state of torch's Adam."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        use_torch_layers()
        super().__init__(*args, **kwargs)

    def prepare(self) -> None:
        """Called before a model is built."""
        use_torch_layers()
        if not self.engine_config.vanilla_mbridge:  # type: ignore[attr-defined]
            adapters = self.model_config.lora.get("rank", 0) > 0  # type: ignore[attr-defined]
            import_bridge(adapters=adapters)
            # Megatron-Bridge's mixtures ask for Transformer Engine's permutation of tokens unless told otherwise.
            self.engine_config.override_transformer_config.setdefault("moe_permute_fusion", False)  # type: ignore[attr-defined]
            if adapters:
                complete_adapters()

    def initialize(self) -> Any:
        self.prepare()
        return super().initialize()  # type: ignore[misc]

    def _build_megatron_module(self) -> Any:
        chunks = super()._build_megatron_module()  # type: ignore[misc]
        for module in (module for chunk in chunks for module in chunk.modules()):
            wrapped = getattr(module, "to_wrap", None)
            if isinstance(wrapped, TELayerNormColumnParallelLinear):  # by an adapter
                wrapped.return_layernorm_output = True
        return chunks

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        initialize_adam_state(self.optimizer)  # type: ignore[attr-defined]
        result = super().load_checkpoint(*args, **kwargs)  # type: ignore[misc]
        restore_adam_steps(self.optimizer)  # type: ignore[attr-defined]
        return result


class TorchMegatronEngine(SharesPrefixes, TorchEngineMixin, MegatronEngineWithLMHead):
    """Megatron's language model engine without Transformer Engine."""


class TorchMegatronValueEngine(SharesValues, TorchEngineMixin, MegatronEngineWithValueHead):
    """Megatron's value model engine without Transformer Engine."""


def initialize_adam_state(optimizer: Any) -> None:
    """Give torch's Adam the state of step 0, which it would make only in its first step.

    Megatron's distributed optimizer reads the step of an existing state to describe what it is about to load. A fresh
    process has no such state; Transformer Engine's Adam keeps the step elsewhere.
    """
    for adam in torch_optimizers(optimizer):
        for parameter in (p for group in adam.param_groups for p in group["params"] if p not in adam.state):
            zeros = (torch.zeros_like(parameter) for _ in range(2))
            adam.state[parameter] = dict(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True), step=torch.tensor(0.0))


def restore_adam_steps(optimizer: Any) -> None:
    """Give each parameter the step that was saved, in a counter of its own.

    The distributed optimizer keeps the step beside its parameter groups. Loading leaves torch's Adam
    with the counters of `initialize_adam_state`, or with one for all parameters, counted up by each.
    """
    for adam in torch_optimizers(optimizer):
        for group in adam.param_groups:
            for state in (adam.state[p] for p in group["params"] if "step" in group):
                state["step"] = torch.tensor(float(group["step"]))


def torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """torch's optimizers inside Megatron's; none in an engine that only runs forward passes."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part.optimizer for part in parts if part is not None]
