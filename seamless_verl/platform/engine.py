"""verl's Megatron engine on the host: registered for device `cpu` when verl imports this module.

verl imports it as `actor_rollout_ref.model.external_lib` (and `critic.model.external_lib`).
"""

from __future__ import annotations

from typing import Any

from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import (
    MegatronEngineWithLMHead,
    MegatronEngineWithValueHead,
)

from seamless_verl.platform.megatron.adapt import adapt_megatron
from seamless_verl.platform.process_group import default_to_gloo


class HostMegatronEngine(MegatronEngineWithLMHead):
    """Megatron's language model engine, with Megatron adapted before its state and before its model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        adapt_megatron()
        super().__init__(*args, **kwargs)

    def initialize(self) -> Any:
        adapt_megatron()  # again: verl has imported more of Megatron since
        return super().initialize()


class HostMegatronValueEngine(MegatronEngineWithValueHead):
    """Megatron's value model engine, adapted in the same two places."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        adapt_megatron()
        super().__init__(*args, **kwargs)

    def initialize(self) -> Any:
        adapt_megatron()
        return super().initialize()


default_to_gloo()
EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")(HostMegatronEngine)
EngineRegistry.register(model_type="value_model", backend="megatron", device="cpu")(HostMegatronValueEngine)
