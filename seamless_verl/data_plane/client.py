"""The data plane's clients: the trainer, which starts its actors, and agent loops, which look them up.

Ray restarts an actor that died, on its own node, where its journal is, and repeats the calls that had no reply. The
trainer commands the first actor, which commands the others. A hash of its name assigns a session or a call to an actor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from seamless_verl.config.roles import ENGINE_KWARGS, engine_option
from seamless_verl.config.schema import JOURNAL_DAYS, SeamlessConfig
from seamless_verl.data_plane.actor import DataPlane
from seamless_verl.data_plane.finished_sessions import HandedNote, TakenUpSession
from seamless_verl.data_plane.lease_book import DONE, TaskOrder, TaskResult
from seamless_verl.data_plane.restart import SocketHolder
from seamless_verl.data_plane.server_calls import ServerCall
from seamless_verl.data_plane.settings import PlaneSettings, SessionSettings
from seamless_verl.errors import ReplicaLostError
from seamless_verl.gateway.request_rules import RequestRules
from seamless_verl.journal import GroupDecided
from seamless_verl.rollout.observation import RolloutObservation, merged
from seamless_verl.runtime.actor_death import ACTOR_GONE, death_reason
from seamless_verl.runtime.process import WholeWork
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.policies import GrammarTokens
from seamless_verl.trajectory.session import Closed

logger = logging.getLogger(__name__)
PLANE = "seamless_data_plane"  # name of the first data plane's actor, in the job's namespace
STOP_S = 60.0  # for all data planes to end
# How many of the actor's methods may run at once. Each call of an agent loop is one, and a command that freed them must
# not wait behind them, so there is no limit in practice. A waiting one takes about 55 KB; concurrency groups would give
# commands an event loop of their own, beside the one that owns the fleet.
CONCURRENCY = 1_000_000
RESTARTED_FOREVER = {"max_restarts": -1, "max_task_retries": -1}
_prompts_to_take_up: dict[Any, frozenset[str]] = {}  # by data plane
_planes: dict[tuple[str, str], list[Any]] = {}  # a job's data planes, by its Ray session and its job id
_clean_ups = WholeWork()  # of tasks that were cancelled


@dataclass(frozen=True)
class PlacedReplica:
    """A replica and its devices, named as in the ledger; `shares_device` says whether the trainer uses them too."""

    replica: Any
    shares_device: bool
    devices: tuple[str, ...]

    @property
    def replica_id(self) -> str:
        return f"replica-{self.replica.replica_rank}"


class DataPlaneClient:
    """The trainer's client. Owns the actors; the first, `actor`, runs on this node. The replicas require `token`."""

    def __init__(self, config: DictConfig, seamless: SeamlessConfig, nodes: Sequence[str] = ()) -> None:
        """Starts the data planes on these nodes, of which the first is this one; by default on all."""
        self.token = secrets.token_urlsafe()
        self.listen_s = float(seamless.watchdog.transition_s)
        self.socket_holders: list[Any] = []
        chosen = nodes or all_nodes()
        shards = range(seamless.gateway.shards)
        self.actors = [self._start(config, seamless, shard, chosen[shard % len(chosen)]) for shard in shards]
        self.actor = self.actors[0]
        self.urls = [actor.start.remote() for actor in self.actors]
        self.hosts: dict[str, str] = {}  # the address of each attached replica's host, by the replica's id

    def _start(self, config: DictConfig, seamless: SeamlessConfig, shard: int, node: str) -> Any:
        placement = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
        sessions = None
        if seamless.gateway.enabled:
            name = f"{plane_name(shard)}-socket"
            port = seamless.gateway.port + shard if seamless.gateway.port else 0
            holder = ray.remote(SocketHolder).options(**placement, name=name).remote(port)
            self.socket_holders.append(holder)
            sessions = session_settings(config, seamless, shard, name, ray.get(holder.address.remote())[1])
        settings = plane_settings(config, seamless, shard, self.token, sessions)
        options = {**placement, **RESTARTED_FOREVER, "name": plane_name(shard), "max_concurrency": CONCURRENCY}
        return ray.remote(DataPlane).options(**options).remote(settings)

    def execute(self, command: str, *arguments: Any) -> Any:
        """Executes a command of the rollout manager; returns its result."""
        return ray.get(self.actor.execute.remote(command, *arguments))

    def observe(self, urgent: Sequence[str] = ()) -> RolloutObservation:
        """The load of each replica now, with the calls counted that are of these groups, by their prompts' uids."""
        return merged(ray.get([actor.observe.remote(urgent) for actor in self.actors]))

    def live(self, timeout_s: float) -> tuple[dict[str, float], RolloutObservation]:
        """Metrics of all data planes and the load of each replica now; raises GetTimeoutError for no reply in time."""
        asked = [self.actor.live_metrics.remote(), *(actor.observe.remote(()) for actor in self.actors)]
        metrics, *seen = ray.get(asked, timeout=timeout_s)
        return metrics, merged(seen)

    def attach(self, replicas: Sequence[PlacedReplica], *, keep_kv: bool) -> None:
        """Makes the replicas' servers listen and the data planes connect; replicas serve after their next update.

        Raises ReplicaLostError where some do not listen within `seamless.watchdog.transition_s`.
        """
        servers = [placed.replica.server_handle for placed in replicas]
        listening = [
            server.listen.remote(self.token, placed.devices, keep_kv)
            for server, placed in zip(servers, replicas, strict=True)
        ]
        names = [placed.replica_id for placed in replicas]
        addresses = self._listening(names, listening)
        self.hosts.update((name, host) for name, (host, _) in zip(names, addresses, strict=True))
        listeners = zip(names, servers, addresses, strict=True)
        ray.get([self.actor.attach.remote(name, *address, server) for name, server, address in listeners])

    def _listening(self, names: Sequence[str], replies: Sequence[Any]) -> list[tuple[str, int]]:
        """Where the servers listen."""
        silent = set(ray.wait(list(replies), num_returns=len(replies), timeout=self.listen_s)[1]) if replies else set()
        if missing := [name for name, reply in zip(names, replies, strict=True) if reply in silent]:
            reason = f"its server does not listen after {self.listen_s:g} s (seamless.watchdog.transition_s)"
            raise ReplicaLostError(", ".join(missing), reason)
        addresses: list[tuple[str, int]] = ray.get(list(replies))
        return addresses

    def log_addresses(self) -> None:
        """Logs where the gateway listens, when it does; nothing without a gateway."""
        if urls := [url for url in ray.get(self.urls) if url is not None]:
            logger.info("The gateway listens at %s", ", ".join(urls))

    def begin_run(self, run: str, version: int) -> None:
        """Tells the data planes which run this is, and from which version it goes on."""
        ray.get([actor.begin_run.remote(run, version) for actor in self.actors])

    def record_groups(self, groups: Sequence[GroupDecided]) -> None:
        """Writes what became of groups into the journals of their sessions."""
        if groups:
            ray.get([actor.record_groups.remote(groups) for actor in self.actors])

    def stop(self) -> None:
        """Ends the data planes; raises GetTimeoutError if they do not end in time."""
        ray.get([actor.stop.remote() for actor in self.actors], timeout=STOP_S)
        for actor in (*self.actors, *self.socket_holders):
            ray.kill(actor)


def all_nodes() -> list[str]:
    """The nodes that are alive, this one first."""
    own = ray.get_runtime_context().get_node_id()
    alive = sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])
    return [own, *(node for node in alive if node != own)]


def plane_settings(
    config: DictConfig, seamless: SeamlessConfig, shard: int, token: str, sessions: SessionSettings | None
) -> PlaneSettings:
    shards = seamless.gateway.shards
    return PlaneSettings(
        plane_name(shard),
        token,
        capacity_share(config.actor_rollout_ref.rollout.max_num_seqs, shard, shards),
        others=() if shard else tuple(plane_name(other) for other in range(1, shards)),
        mirror=shard > 0,
        max_failed_groups=seamless.gateway.failed_in_a_row,
        transition_s=seamless.watchdog.transition_s,
        restarts=seamless.restarts > 0,
        grammars_resume=engine_option(OmegaConf.select(config, ENGINE_KWARGS), "scheduler_cls") is None,
        shares=seamless.drafts != "off",
        validation_first=seamless.evaluation == "inline",
        sessions=sessions,
    )


def session_settings(
    config: DictConfig, seamless: SeamlessConfig, shard: int, holder: str, port: int
) -> SessionSettings:
    rollout, gateway = config.actor_rollout_ref.rollout, seamless.gateway
    length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    model = str(config.actor_rollout_ref.model.path)
    names = ("--served-model-name", os.path.basename(model.rstrip("/")), "policy")
    return SessionSettings(
        model=model,
        journal=str(gateway.journal_of(shard, config.trainer.default_local_dir)),
        admin_key=secrets.token_urlsafe(),
        runner_key=secrets.token_urlsafe(),
        journal_days=JOURNAL_DAYS,
        journal_gib=gateway.journal_gib,
        port=port,
        options=(f"--max-model-len={length}", f"--dtype={rollout.dtype}", *names, *gateway.options),
        max_sequence=rollout.prompt_length + rollout.response_length,
        limit_keys=limit_keys(rollout),
        grammar=GrammarTokens(seamless.tokens.grammar),
        routes=bool(rollout.get("enable_rollout_routing_replay")),
        socket_holder=holder,
        public_address=gateway.public_address,
        rules=RequestRules(True, "refuse", "refuse") if gateway.strict else RequestRules(),
    )


def limit_keys(rollout: DictConfig) -> str:
    """The settings from which the longest training sequence follows, for messages."""
    return f"data.max_prompt_length={rollout.prompt_length} + data.max_response_length={rollout.response_length}"


def plane_name(shard: int) -> str:
    return f"{PLANE}-{shard}" if shard else PLANE


def shard_of(key: str, shards: int) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") % shards


def capacity_share(whole: int, shard: int, shards: int) -> int:
    """One data plane's share of a replica's capacity; all shares add up to `whole`."""
    return (whole + shards - 1 - shard) // shards


def plane_for(config: DictConfig, key: str) -> Any:
    """The data plane's actor for a session or a call of this name; a process looks up those of its job once."""
    context = ray.get_runtime_context()
    job = (context.get_session_name(), context.get_job_id())  # a driver may connect to several
    if job not in _planes:
        shards = SeamlessConfig.parse(config.get("seamless")).gateway.shards
        _planes[job] = [ray.get_actor(plane_name(shard)) for shard in range(shards)]
    return _planes[job][shard_of(key, len(_planes[job]))]


async def await_reply(call: Any, *, cancels: bool = False) -> Any:
    """The reply to a call of a data plane's method; `call` is its reference.

    A cancelled task returns only when the call has ended, since Ray repeats a call without a reply. With `cancels` the
    call is cancelled too, and ends at once.
    """
    reply = asyncio.wrap_future(call.future())
    try:
        return await asyncio.shield(reply)
    except asyncio.CancelledError:
        if cancels:
            ray.cancel(call, recursive=False)  # other callers may wait for tasks that it started
        await asyncio.gather(reply, return_exceptions=True)  # no longer wanted
        raise


async def reply_or_undone(call: Any, undo: Callable[[Any], Awaitable[None]], *, cancels: bool = False) -> Any:
    """The reply to a call; a task that is cancelled meanwhile has what the call replied all the same undone."""
    try:
        return await await_reply(call, cancels=cancels)
    except asyncio.CancelledError:

        async def undo_reply() -> None:
            (ended,) = await asyncio.gather(asyncio.wrap_future(call.future()), return_exceptions=True)
            if ended is not None and not isinstance(ended, BaseException):
                await undo(ended)

        await _clean_ups.do(undo_reply())
        raise


async def open_session(plane: Any, opening: dict[str, Any]) -> dict[str, Any]:
    """Opens a session in this data plane; a task that is cancelled meanwhile leaves none open."""

    async def discard_opened(opened: dict[str, Any]) -> None:
        await _discard(plane, opened["session_id"], Closed.ABANDONED, DropReason.SESSION)

    opened: dict[str, Any] = await reply_or_undone(plane.open_session.remote(opening), discard_opened)
    return opened


async def run_task(plane: Any, order: TaskOrder, dropped_as: Callable[[], DropReason]) -> TaskResult:
    """Has a runner do the task; one that is cancelled is withdrawn, and one that was done just then is dropped."""

    async def discard_done(result: TaskResult) -> None:
        if result.state is DONE:
            await _discard(plane, result.session_id, Closed.ABANDONED, dropped_as())

    result: TaskResult = await reply_or_undone(plane.run_task.remote(order), discard_done, cancels=True)
    return result


async def take_up_session(
    plane: Any, uid: str, sample: str, submitted: int, dropped_as: Callable[[], DropReason]
) -> TakenUpSession | None:
    """The session that an earlier start of the run ended at this place of a group; None if there is none.

    A process asks each data plane once which prompts have any. What a cancelled task has taken up is dropped.
    """
    if plane not in _prompts_to_take_up:
        _prompts_to_take_up[plane] = await await_reply(plane.prompts_to_take_up.remote())
    if uid not in _prompts_to_take_up[plane]:
        return None

    async def drop_taken(taken: TakenUpSession) -> None:
        note = HandedNote(uid, "its agent was stopped", dropped=dropped_as())
        await await_reply(plane.acknowledge.remote(taken.session_id, False, note))

    call = plane.take_up_session.remote(uid, sample, submitted)
    taken: TakenUpSession | None = await reply_or_undone(call, drop_taken)
    return taken


async def discard_session(
    plane: Any, session_id: str, reason: Closed, dropped: DropReason = DropReason.SESSION
) -> None:
    """Ends the session; nothing of it is trained, and its tokens are counted for the reason `dropped`.

    Cancelled, it does so all the same: a session that is closed and never acknowledged would stay for ever.
    """
    await _clean_ups.do(_discard(plane, session_id, reason, dropped))


async def _discard(plane: Any, session_id: str, reason: Closed, dropped: DropReason) -> None:
    await await_reply(plane.close_session.remote(session_id, reason))
    why = "its agent was stopped" if reason is Closed.ABANDONED else "its agent loop failed"
    note = HandedNote(reason=why, dropped=dropped)
    await await_reply(plane.acknowledge.remote(session_id, False, note))


def living_replies(calls: Iterable[ServerCall]) -> Iterator[Any]:
    """The replies of the replicas' servers that are alive, of calls that have ended."""
    for call in calls:
        try:
            yield ray.get(call.reply)
        except ACTOR_GONE as error:
            logger.warning("a replica's server is dead: %s", death_reason(error))
