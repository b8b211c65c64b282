"""The trainer's end of the data plane: starts its actors, and attaches the replicas to them.

Ray starts an actor again that died, on its own node, where its journal is, and repeats what it had not answered.
The trainer commands the first of them, which commands the others.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seamless_verl.config import engine_kwargs
from seamless_verl.config.schema import GatewayConfig, SeamlessConfig
from seamless_verl.trainer.data_plane.doorstep import Doorstep
from seamless_verl.trainer.data_plane.plane import DataPlane, PlaneSettings
from seamless_verl.trainer.data_plane.rollout import RolloutSettings
from seamless_verl.trainer.data_plane.sessions import SessionSettings
from seamless_verl.trainer.data_plane.shards import plane_name, share_of
from seamless_verl.trainer.servers import PlacedReplica

logger = logging.getLogger(__name__)
STOP_S = 60.0
CONCURRENCY = 4096  # methods of the actor that may wait at once: one for each open session or call, and more
FOR_EVER = {"max_restarts": -1, "max_task_retries": -1}


class PlaneLink:
    """Owns the actors. The first, `actor`, runs on this node; the replicas' doors ask for `token`."""

    def __init__(self, config: DictConfig, seamless: SeamlessConfig) -> None:
        self.token = secrets.token_urlsafe()
        self.doorsteps: list[Any] = []
        self.actors = [
            self._start(config, seamless, shard, node) for shard, node in enumerate(nodes(seamless.gateway.shards))
        ]
        self.actor = self.actors[0]
        self.urls = [actor.start.remote() for actor in self.actors]

    def _start(self, config: DictConfig, seamless: SeamlessConfig, shard: int, node: str) -> Any:
        gateway = seamless.gateway
        there = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        sessions = None
        if gateway.enabled:
            port = gateway.port + shard if gateway.port else 0
            name = f"{plane_name(shard)}-doorstep"
            doorstep = ray.remote(Doorstep).options(**there, name=name).remote(port)
            self.doorsteps.append(doorstep)
            sessions = sessions_of(config, gateway, shard, name, ray.get(doorstep.address.remote())[1])
        settings = PlaneSettings(rollout_of(config, seamless, shard, self.token), sessions)
        placed = {**there, **FOR_EVER, "name": plane_name(shard), "max_concurrency": CONCURRENCY}
        return ray.remote(DataPlane).options(**placed).remote(settings)

    def attach(self, replicas: Sequence[PlacedReplica], *, keep_kv: bool) -> None:
        """Open the replicas' doors and let the planes in; they serve after the next commit."""
        servers = [one.replica.server_handle for one in replicas]
        opened = zip(servers, replicas, strict=True)
        doors = ray.get([server.open_door.remote(self.token, one.devices, keep_kv) for server, one in opened])
        ray.get(
            [
                self.actor.attach.remote(one.replica_id, host, port, server)
                for one, server, (host, port) in zip(replicas, servers, doors, strict=True)
            ]
        )
        if urls := [url for url in ray.get(self.urls) if url is not None]:
            logger.info("The gateway listens at %s", ", ".join(urls))

    def stop(self) -> None:
        """Raises GetTimeoutError when it does not end."""
        ray.get([actor.stop.remote() for actor in self.actors], timeout=STOP_S)
        for actor in (*self.actors, *self.doorsteps):
            ray.kill(actor)


def nodes(shards: int) -> list[str]:
    """The node of each plane: this one first, then the others in turn."""
    here = ray.get_runtime_context().get_node_id()
    known = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    order = [here, *(node for node in known if node != here)]
    return [order[shard % len(order)] for shard in range(shards)]


def rollout_of(config: DictConfig, seamless: SeamlessConfig, shard: int, token: str) -> RolloutSettings:
    gateway = seamless.gateway
    return RolloutSettings(
        plane_name(shard),
        token,
        share_of(config.actor_rollout_ref.rollout.max_num_seqs, shard, gateway.shards),
        others=() if shard else tuple(plane_name(other) for other in range(1, gateway.shards)),
        mirror=shard > 0,
        max_failed_groups=gateway.max_failed_groups,
        transition_s=seamless.watchdog.transition_s,
        grammars_resume=engine_kwargs.given(OmegaConf.select(config, engine_kwargs.KEY), "scheduler_cls") is None,
    )


def sessions_of(config: DictConfig, gateway: GatewayConfig, shard: int, doorstep: str, port: int) -> SessionSettings:
    rollout = config.actor_rollout_ref.rollout
    length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    model = str(config.actor_rollout_ref.model.path)
    names = ("--served-model-name", os.path.basename(model.rstrip("/")), "policy")
    return SessionSettings(
        model=model,
        journal=str(gateway.journal_of(shard, config.trainer.default_local_dir)),
        port=port,
        options=(f"--max-model-len={length}", f"--dtype={rollout.dtype}", *names, *gateway.options),
        longest_prompt=rollout.prompt_length,
        longest_response=rollout.response_length,
        doorstep=doorstep,
    )
