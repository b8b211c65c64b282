"""Registers verl's Megatron engines without Transformer Engine for device `cuda` when verl imports this module.

verl imports it as `actor_rollout_ref.model.external_lib` (and `critic.model.external_lib`), which
`platform=accelerator_without_te` sets, in every process that reads the model's config. verl's registry prefers an
engine of a device's vendor over one of the device alone, so that verl's own stays as it is.
"""

from __future__ import annotations

import os

WORKER_GROUP = "WG_BACKEND"  # verl sets it in the processes of its worker groups
DEVICE, VENDORS = "cuda", ("nvidia", "amd")


def register_engines() -> None:
    """Register the engines with verl, once."""
    from verl.workers.engine import EngineRegistry

    from seamless_verl.platform.megatron.engines import TorchMegatronEngine, TorchMegatronValueEngine

    for model_type, engine in (("language_model", TorchMegatronEngine), ("value_model", TorchMegatronValueEngine)):
        if (DEVICE, VENDORS[0]) not in EngineRegistry._engines[model_type]["megatron"]:
            register = EngineRegistry.register(model_type, "megatron", device=DEVICE, vendor=list(VENDORS))
            register(engine)


if WORKER_GROUP in os.environ:
    register_engines()
