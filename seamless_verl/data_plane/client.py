"""Waiting for a plane's answer, so that no call, and no session, is open any more when nobody waits.

Which of a job's planes a session or a call belongs to: a function of its name, the same for everybody.

The trainer's end of the data plane: starts its actors, and attaches the replicas to them.

Ray starts an actor again that died, on its own node, where its journal is, and repeats what it had not answered.
The trainer commands the first of them, which commands the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seamless_verl.config import engine_kwargs
from seamless_verl.config.schema import GatewayConfig, SeamlessConfig
from seamless_verl.data_plane.actor import DataPlane, PlaneSettings, RolloutSettings
from seamless_verl.data_plane.restart import SocketHolder
from seamless_verl.data_plane.sessions import SessionSettings
from seamless_verl.trajectory.session import Closed


@dataclass(frozen=True)
class PlacedReplica:
    """A replica; `shares_device` with the trainer, or is alone on its own. `devices` are named as in the ledger."""

    replica: Any
    shares_device: bool
    devices: tuple[str, ...]

    @property
    def replica_id(self) -> str:
        return f"replica-{self.replica.replica_rank}"


def living_replies(asked: Iterable[Any]) -> Iterator[Any]:
    """Answers of the replicas' servers, without those of the dead, whom their calls have left already."""
    for answer in asked:
        try:
            yield ray.get(answer)
        except ray.exceptions.RayActorError as error:
            logger.warning("a replica's server is dead: %s", error)


async def answered(call: Any, *, cut: bool = False) -> Any:
    """What a method of a plane returns; `call` is its reference.

    Whoever is cancelled meanwhile goes on when the call has ended, which for one that may be `cut` is at once:
    Ray repeats what a plane has not answered, also for callers that wait no longer.
    """
    answer = asyncio.wrap_future(call.future())
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        if cut:
            ray.cancel(call, recursive=False)  # what it started, others may wait for too
        await asyncio.gather(answer, return_exceptions=True)  # nobody wants it any more
        raise


async def opened_session(plane: Any, opening: dict[str, Any]) -> dict[str, Any]:
    """A session of this plane; whoever is cancelled meanwhile leaves none open."""
    call = plane.open.remote(opening)
    try:
        opened: dict[str, Any] = await answered(call)
    except asyncio.CancelledError:
        (ended,) = await asyncio.gather(asyncio.wrap_future(call.future()), return_exceptions=True)
        if not isinstance(ended, BaseException):
            await left(plane, ended["session_id"], Closed.ABANDONED)
        raise
    return opened


async def left(plane: Any, session_id: str, reason: Closed) -> None:
    """The session ends so, and nothing of it is kept."""
    await answered(plane.close.remote(session_id, reason))
    await answered(plane.handed.remote(session_id, kept=False))


NAME = "seamless_data_plane"  # of the first plane's actor, in the job's namespace
_found: dict[tuple[str, str], list[Any]] = {}  # a job's planes, by its cluster's session and its id there


def plane_name(shard: int) -> str:
    return f"{NAME}-{shard}" if shard else NAME


def shard_of(key: str, shards: int) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") % shards


def plane_of(config: DictConfig, key: str) -> Any:
    """The actor for a session or a call of this name, in a job of this config.

    A process asks Ray once for its job's planes: an actor that Ray starts again after a death keeps its handle.
    """
    context = ray.get_runtime_context()
    job = (context.get_session_name(), context.get_job_id())  # a driver may come to see several
    if job not in _found:
        shards = SeamlessConfig.parse(config.get("seamless")).gateway.shards
        _found[job] = [ray.get_actor(plane_name(shard)) for shard in range(shards)]
    return _found[job][shard_of(key, len(_found[job]))]


def share_of(whole: int, shard: int, shards: int) -> int:
    """What a plane has of something countable; all shares add up to the whole."""
    return (whole + shards - 1 - shard) // shards


logger = logging.getLogger(__name__)
STOP_S = 60.0
CONCURRENCY = 4096  # methods of the actor that may wait at once: one for each open session or call, and more
FOR_EVER = {"max_restarts": -1, "max_task_retries": -1}


class DataPlaneClient:
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
            doorstep = ray.remote(SocketHolder).options(**there, name=name).remote(port)
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
