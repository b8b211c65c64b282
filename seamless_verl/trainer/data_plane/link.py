"""The trainer's end of the data plane: starts the actor, and attaches the replicas to it."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence

import ray
from omegaconf import DictConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seamless_verl.config.schema import GatewayConfig, SeamlessConfig
from seamless_verl.trainer.data_plane.plane import NAME, DataPlane, PlaneSettings
from seamless_verl.trainer.data_plane.sessions import SessionSettings
from seamless_verl.trainer.servers import PlacedReplica

logger = logging.getLogger(__name__)
JOURNAL = "trajectories.sqlite"
STOP_S = 60.0
CONCURRENCY = 4096  # methods of the actor that may wait at once: one for each open session or call, and more


class PlaneLink:
    """Owns the actor, which runs on this node: here is the journal's disk. The replicas' doors ask for `token`."""

    def __init__(self, config: DictConfig, seamless: SeamlessConfig) -> None:
        self.token = secrets.token_urlsafe()
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        placed = {"name": NAME, "num_cpus": 0, "max_concurrency": CONCURRENCY, "scheduling_strategy": here}
        self.actor = ray.remote(DataPlane).options(**placed).remote(settings_of(config, seamless, self.token))
        self.url = self.actor.start.remote()

    def attach(self, replicas: Sequence[PlacedReplica], *, keep_kv: bool) -> None:
        """Open the replicas' doors and let the plane in; they serve after the next commit."""
        servers = [one.replica.server_handle for one in replicas]
        opened = zip(servers, replicas, strict=True)
        doors = ray.get([server.open_door.remote(self.token, one.devices, keep_kv) for server, one in opened])
        ray.get(
            [
                self.actor.attach.remote(one.replica_id, host, port, server)
                for one, server, (host, port) in zip(replicas, servers, doors, strict=True)
            ]
        )
        if (url := ray.get(self.url)) is not None:
            logger.info("The gateway listens at %s", url)

    def stop(self) -> None:
        """Raises GetTimeoutError when it does not end."""
        ray.get(self.actor.stop.remote(), timeout=STOP_S)


def settings_of(config: DictConfig, seamless: SeamlessConfig, token: str) -> PlaneSettings:
    return PlaneSettings(
        token,
        config.actor_rollout_ref.rollout.max_num_seqs,
        seamless.watchdog.transition_s,
        sessions_of(config, seamless.gateway) if seamless.gateway.enabled else None,
    )


def sessions_of(config: DictConfig, gateway: GatewayConfig) -> SessionSettings:
    rollout = config.actor_rollout_ref.rollout
    journal = gateway.journal or os.path.join(config.trainer.default_local_dir, JOURNAL)
    length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    model = str(config.actor_rollout_ref.model.path)
    names = ("--served-model-name", os.path.basename(model.rstrip("/")), "policy")
    return SessionSettings(
        model=model,
        journal=journal,
        port=gateway.port,
        options=(f"--max-model-len={length}", f"--dtype={rollout.dtype}", *names, *gateway.options),
        longest_prompt=rollout.prompt_length,
        longest_response=rollout.response_length,
    )
