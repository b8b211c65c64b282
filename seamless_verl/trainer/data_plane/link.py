"""The trainer's end of the data plane: starts the actor, attaches the replicas, tells it of weight commits."""

from __future__ import annotations

import logging
import os
import secrets
from typing import Any

import ray
from omegaconf import DictConfig
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seamless_verl.config.schema import GatewayConfig
from seamless_verl.trainer.data_plane.plane import NAME, DataPlane, PlaneSettings
from seamless_verl.trainer.layouts import RolloutPlace

logger = logging.getLogger(__name__)
JOURNAL = "trajectories.sqlite"
STOP_S = 60.0
CONCURRENCY = 4096  # methods of the actor that may wait at once: one for each open session and more


class PlaneLink:
    """Owns the actor, which runs on this node: here is the journal's disk. The replicas' doors ask for `token`."""

    def __init__(self, config: DictConfig, gateway: GatewayConfig) -> None:
        self.token = secrets.token_urlsafe()
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        placed = {"name": NAME, "num_cpus": 0, "max_concurrency": CONCURRENCY, "scheduling_strategy": here}
        self.actor = ray.remote(DataPlane).options(**placed).remote(settings_of(config, gateway, self.token))
        self.url = self.actor.start.remote()

    def join(self, place: RolloutPlace) -> RolloutPlace:
        """Open the doors of the place's replicas and let the gateway in; it serves after the next commit."""
        replicas = place.servers.get_replicas()
        doors = ray.get([replica.server_handle.open_door.remote(self.token) for replica in replicas])
        ray.get(
            [
                self.actor.attach.remote(f"replica-{replica.replica_rank}", host, port, replica.server_handle)
                for replica, (host, port) in zip(replicas, doors, strict=True)
            ]
        )
        logger.info("The gateway listens at %s", ray.get(self.url))
        return WithGateway(place, self)

    def stop(self) -> None:
        """Raises GetTimeoutError when the gateway does not end."""
        ray.get(self.actor.stop.remote(), timeout=STOP_S)


class WithGateway(RolloutPlace):
    """A layout whose replicas also serve the gateway: it hears of every pause and commit before they do."""

    def __init__(self, place: RolloutPlace, link: PlaneLink) -> None:
        super().__init__(place.servers, place.transfer)
        self.place, self.link = place, link

    def before_training(self) -> None:
        if self.place.pauses:
            ray.get(self.link.actor.pause.remote())
        self.place.before_training()

    def commit(self, version: int) -> dict[str, Any]:
        ray.get(self.link.actor.begin_sync.remote())
        metrics = self.place.commit(version)
        ray.get(self.link.actor.synced.remote(version))
        return metrics | ray.get(self.link.actor.check_integrity.remote())


def settings_of(config: DictConfig, gateway: GatewayConfig, token: str) -> PlaneSettings:
    rollout = config.actor_rollout_ref.rollout
    journal = gateway.journal or os.path.join(config.trainer.default_local_dir, JOURNAL)
    length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    model = str(config.actor_rollout_ref.model.path)
    names = ("--served-model-name", os.path.basename(model.rstrip("/")), "policy")
    return PlaneSettings(
        model=model,
        journal=journal,
        token=token,
        port=gateway.port,
        options=(f"--max-model-len={length}", f"--dtype={rollout.dtype}", *names, *gateway.options),
        capacity=rollout.max_num_seqs,
        longest_prompt=rollout.prompt_length,
        longest_response=rollout.response_length,
    )
