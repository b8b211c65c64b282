"""Registers verl's Megatron and FSDP engines for device `cpu` when verl imports this module.

verl imports it as `actor_rollout_ref.model.external_lib` (and `critic.model.external_lib`) in every process that reads
the model's config. Only members of a worker group build engines, so only they import Megatron here.
"""

from __future__ import annotations

import os

from seamless_verl.platform.process_group import default_to_gloo, share_gloo_devices

WORKER_GROUP = "WG_BACKEND"  # verl sets it in the processes of its worker groups


def register_engines() -> None:
    """Register the host engines with verl, once."""
    from verl.workers.engine import EngineRegistry

    from seamless_verl.platform.host_fsdp import HostFSDPEngine, HostFSDPValueEngine
    from seamless_verl.platform.megatron.host_engines import HostMegatronEngine, HostMegatronValueEngine

    default_to_gloo()
    share_gloo_devices()
    for model_type, backend, engine in (
        ("language_model", "megatron", HostMegatronEngine),
        ("value_model", "megatron", HostMegatronValueEngine),
        ("language_model", "fsdp2", HostFSDPEngine),
        ("value_model", "fsdp2", HostFSDPValueEngine),
    ):
        if "cpu" not in EngineRegistry._engines[model_type][backend]:
            EngineRegistry.register(model_type=model_type, backend=backend, device="cpu")(engine)


if WORKER_GROUP in os.environ:
    register_engines()
