"""Makes the parts of a run that follow from its config and its workers; those that are independent start together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.replica import RolloutReplica

from seamless_verl.config.planning import choose_handover, plan_of
from seamless_verl.config.schema import Handover, SeamlessConfig
from seamless_verl.config.settings import Settings
from seamless_verl.data_plane.client import DataPlaneClient, PlacedReplica, living_replies
from seamless_verl.data_plane.server_calls import ServerCalls
from seamless_verl.replica.server import SeamlessReplica
from seamless_verl.resources.ahead import StalenessBound
from seamless_verl.resources.ledger.activity import DeviceUse, NodeActivity
from seamless_verl.resources.lending import RecordedPolicy, lending_policy
from seamless_verl.resources.placement import ReplicaKind
from seamless_verl.resources.plan import Plan
from seamless_verl.resources.tags import Layout
from seamless_verl.resources.tail_batching import TailBatching, extra_prompts
from seamless_verl.runtime.actor_death import ACTOR_GONE, death_reason
from seamless_verl.runtime.files import RunDescription
from seamless_verl.runtime.process import BackgroundTask
from seamless_verl.runtime.sample_lengths import LengthRecord
from seamless_verl.trainer.checkpoints import PROMPTS, load_state, resumed_checkpoint
from seamless_verl.trainer.deaths import numbered
from seamless_verl.trainer.device_time import DeviceTime, LostSource, server_reports, train_device
from seamless_verl.trainer.group_wait import GroupWait
from seamless_verl.trainer.lending import (
    DeviceLending,
    DeviceViews,
    ReleasedLending,
    ResidentLending,
    RunDevices,
    TrainingProgress,
)
from seamless_verl.trainer.mismatch import Mismatch
from seamless_verl.trainer.pools import TagPools
from seamless_verl.trainer.prompt_feed import PromptFeed, RunAhead, RunCalls
from seamless_verl.trainer.prompt_names import PromptNames
from seamless_verl.trainer.replay_buffer import SeamlessReplayBuffer
from seamless_verl.trainer.replica_starts import ReplicaStarter, noticed_s
from seamless_verl.trainer.sampled_prompts import SampledPrompts, sampling_of
from seamless_verl.trainer.servers import SeamlessServers
from seamless_verl.trainer.shared_prefixes import SharedPrefixes
from seamless_verl.trajectory.policies import parse_policy
from seamless_verl.weights.commit import Transfer, WeightCommit
from seamless_verl.weights.update import Reach

logger = logging.getLogger(__name__)
SUBSETS = ("train_max_samples", "val_max_samples")  # of `data`
RECORDING = "lending.jsonl"  # beside the checkpoints, of all starts of a run


@dataclass(frozen=True)
class Placement:
    """On which devices a run trains and generates, and how they change hands; `plan` is None without tags."""

    layout: Layout
    plan: Plan | None
    handover: Handover
    accelerator: bool

    @classmethod
    def of(cls, config: DictConfig, seamless: SeamlessConfig) -> Placement:
        rollout, accelerator = config.actor_rollout_ref.rollout, config.trainer.device != "cpu"
        settings = Settings.of(config, devices=None, accelerator=accelerator)
        return cls(
            seamless.layout_for(rollout.nnodes, rollout.n_gpus_per_node),
            None if seamless.resources is None else plan_of(settings),
            choose_handover(settings).handover,
            accelerator,
        )

    @property
    def shares_accelerators(self) -> bool:
        """Whether replicas and trainer take memory of the same accelerators."""
        return self.layout.shares_devices and self.accelerator

    def generating_ranks(self, world: int) -> int:
        """How many of the trainer's ranks, counted from the first, are on devices that also generate."""
        if self.plan is None:
            return world
        return sum(len(replica.devices) for replica in self.plan.replicas_of(ReplicaKind.HYBRID))


class ServerLaunch:
    """Launches the replicas while the trainer's engines start; stands in for verl's LLMServerManager in its `_setup`.

    They start as soon as the workers' processes exist, or, where both share an accelerator, where verl makes them: vLLM
    sizes its cache by the memory that it finds free, and ends with an error if memory becomes free while it measures.
    So a checkpoint's load, which takes and frees memory, then waits for them. verl puts the replicas that it gets to
    sleep before that load: it gets those that release their memory, since the others may still be starting.

    `pools` are those of tags, and `on_needed` is called where verl makes the replicas.
    """

    def __init__(
        self, config: DictConfig, placement: Placement, pools: TagPools | None, on_needed: Callable[[], None]
    ) -> None:
        self.config, self.placement, self.pools, self.on_needed = config, placement, pools, on_needed
        self.servers: SeamlessServers | None = None
        self.task: BackgroundTask[SeamlessServers] | None = None

    def workers_exist(self, groups: dict[str, Any]) -> None:
        """The processes of these worker groups exist, before any builds a model."""
        actors = next((group for role, group in groups.items() if role.startswith("actor")), None)
        if actors is None or self.servers is not None:
            return
        first = actors.workers[: self.placement.generating_ranks(actors.world_size)]
        sharing = SimpleNamespace(workers=first, world_size=len(first))  # as a worker group, as far as verl reads it
        self.servers = SeamlessServers(self.config, self.placement.layout, sharing, SeamlessReplica, self.pools)
        self.servers.open_balancer()
        if not self.placement.shares_accelerators:
            self.task = BackgroundTask("rollout", self.servers.launch)

    def create(self, **_: Any) -> ServerLaunch:
        assert self.servers is not None
        self.on_needed()
        self.task = self.task or BackgroundTask("rollout", self.servers.launch)
        if self.placement.shares_accelerators:
            self.task.result()
        return self

    create_empty = create

    def get_replicas(self) -> list[RolloutReplica]:
        released = self.result().placed if self.placement.handover.cuts_calls else []
        return [placed.replica for placed in released if placed.shares_device]

    def result(self) -> SeamlessServers:
        """The replicas, when all of them serve; called after `create`."""
        assert self.task is not None
        return self.task.result()


def describe(config: DictConfig, seamless: SeamlessConfig, layout: Layout) -> RunDescription:
    """The description of the run that begins now; its journals are those of the gateway's shards."""
    gateway, folder, model = seamless.gateway, config.trainer.default_local_dir, config.actor_rollout_ref.model
    journals = [gateway.journal_of(shard, folder) for shard in range(gateway.shards)] if gateway.enabled else []
    tokenizer = str(model.get("tokenizer_path") or model.path)
    return RunDescription(
        name=f"{config.trainer.project_name}/{config.trainer.experiment_name}",
        began=time.time(),
        layout=str(layout.value),
        model=str(Path(tokenizer).absolute()) if Path(tokenizer).is_dir() else tokenizer,
        journals=tuple(str(path.absolute()) for path in journals),
        max_staleness=seamless.staleness_bound,
        samples=config.actor_rollout_ref.rollout.n,
        updates=config.trainer.v1.seamless.parameter_sync_step,
    )


def choose_seed(config: DictConfig, names: PromptNames) -> None:
    """Where verl draws a subset of the data without `data.seed`, the seed is that of the run's first start."""
    if (checkpoint := resumed_checkpoint(config)) is not None:
        load_state(checkpoint, {PROMPTS: names})
    if (given := config.data.get("seed")) is not None:
        names.seed = int(given)
        return
    if not any(int(config.data.get(name, -1)) > 0 for name in SUBSETS):
        return
    with open_dict(config):
        config.data.seed = names.seed
    logger.info("data.seed=null: this run draws its subset with seed %d, also when it is resumed", names.seed)


def make_feed(
    config: DictConfig,
    seamless: SeamlessConfig,
    run: RunCalls,
    *,
    updates: int,
    lengths: LengthRecord,
    filter_metric: str | None,
) -> tuple[PromptFeed, SampledPrompts | None]:
    """What submits the prompts of a run, with the buffer of their groups; and what samples them, if there is a sampler.

    A step has `updates`; verl drops groups of which all samples have the same `filter_metric`.
    """
    samples, batch = int(config.actor_rollout_ref.rollout.n), int(config.data.train_batch_size)
    tail = TailBatching(extra_prompts(seamless.tail_batching, batch))
    buffer = SeamlessReplayBuffer(
        bound=StalenessBound(seamless.staleness_bound, batch // updates, updates),
        update=run.update,
        wait=run.wait,
        defers=bool(tail.extra),
        lengths=lengths,
        trainer_mode="seamless",
        trainer_config=config.trainer.v1.get("seamless", {}),
        sampler_kwargs=config.trainer.v1.sampler.sampler_kwargs,
        refill_fn=lambda number: feed.refill(number),
        filter_groups_metric=filter_metric,
    )
    feed = PromptFeed(
        run,
        buffer,
        ahead=RunAhead(seamless.staleness_bound, seamless.ahead, parse_policy(seamless.tokens.policy).oldest),
        tail=tail,
        updates=updates,
        samples=samples,
        lengths=lengths,
        stored_generations=config.skip.rollout_tq.enable,
    )
    if (sampling := sampling_of(seamless, samples)) is None:
        return feed, None
    sampled = SampledPrompts(sampling, buffer, run, threshold=seamless.sampler.threshold)
    feed.extra_sessions = sampled.extra_sessions
    return feed, sampled


@dataclass(frozen=True)
class RunSetup:
    """Makes the parts that need a run's workers and replicas.

    `groups` are the worker groups that compute, of which the first, the actor's, has all devices that train.
    """

    config: DictConfig
    seamless: SeamlessConfig
    placement: Placement
    plane: DataPlaneClient
    servers: SeamlessServers
    groups: Sequence[Any]

    @property
    def replicas(self) -> Sequence[PlacedReplica]:
        return self.servers.placed

    @property
    def folder(self) -> Path:
        return Path(self.config.trainer.default_local_dir)

    def _devices(self) -> RunDevices:
        shared, own = (
            {placed.replica_id: placed.devices for placed in self.replicas if placed.shares_device is shares}
            for shares in (True, False)
        )
        return RunDevices(shared, own, tuple(train_device(i) for i in range(self.groups[0].world_size)))

    def device_time(self) -> DeviceTime:
        devices, calls = self._devices(), ServerCalls("take_activity")

        def collect() -> Iterable[NodeActivity | LostSource]:
            servers = {placed.replica_id: placed.replica.server_handle for placed in self.replicas}
            calls.begin(servers)
            reports = [report for group in self.groups for report in group.take_activity()]
            return [*reports, *server_reports(calls, servers)]

        generating = [device for own in devices.rollout.values() for device in own]
        return DeviceTime(self.folder, [*devices.training, *generating], collect)

    def shared_prefixes(self, groups: Mapping[str, Any]) -> SharedPrefixes | None:
        """What has these groups' workers compute shared prefixes once, if that is asked for; the actor's first."""
        return SharedPrefixes(groups) if self.seamless.shared_prefixes == "auto" else None

    def mismatch(self, finished: Callable[[], Sequence[str]], commit: WeightCommit, *, images: bool) -> Mismatch | None:
        """What compares trainer and engines; an engine reads without a sequence's images, and chooses its experts anew,
        where the trainer replays those of older weights."""
        rollout = self.config.actor_rollout_ref.rollout
        if images or rollout.enable_rollout_routing_replay:
            return None
        return Mismatch(
            lambda: {one.replica_id: one.replica.server_handle for one in self.replicas},
            finished,
            lasting=lambda: [one.replica_id for one in self.replicas if not one.shares_device],
            staged=lambda: commit.committed and commit.committed[1],
            temperature=float(rollout.temperature),
        )

    def commit(self, device_time: DeviceTime) -> WeightCommit:
        """The commit of weights to the replicas."""
        engine = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        trainers, others = self.groups[0], [placed for placed in self.replicas if not placed.shares_device]
        return WeightCommit(
            execute=self.plane.actor.execute.remote,
            metrics=lambda loading: self.plane.actor.checked_metrics.remote(loading=loading),
            pauses_s=self._pauses_s,
            trainers=trainers,
            sharing=self._devices().shared,
            others=[placed.replica_id for placed in others],
            transfer=Transfer(engine, trainers, [placed.replica for placed in others]) if others else None,
            released=self.placement.handover.cuts_calls,
            syncing=partial(device_time.doing, DeviceUse.SYNC),
            hosts=self.plane.hosts,
            seal=self.seamless.seal,
        )

    def _pauses_s(self, ids: Sequence[str]) -> list[float]:
        """Seconds for which each of these replicas paused for its last load; a dead one is left out."""
        servers = {one.replica_id: one.replica.server_handle for one in self.replicas if one.replica_id in ids}
        return list(living_replies(ServerCalls("last_pause_s").call(servers).values()))

    def starter(self, commit: WeightCommit, *, keep_kv: bool) -> ReplicaStarter:
        """What starts lost replicas again."""
        return ReplicaStarter(
            self.servers,
            self.plane,
            limit=self.seamless.restarts,
            noticed_s=noticed_s(self.seamless.watchdog),
            keep_kv=keep_kv,
            must_wait=lambda placed: placed.shares_device and self.placement.shares_accelerators,
            wait_committed=partial(commit.wait, Reach.COMMITTED),
            free_memory=lambda: self.groups[0].free_cached_memory(),
        )

    def lending(
        self,
        device_time: DeviceTime,
        commit: WeightCommit,
        progress: Callable[[], TrainingProgress],
        wait_for_group: Callable[[], bool],
        before_computation: Callable[[], None],
    ) -> DeviceLending:
        """The lending of the trainer's devices; the callables are those of `DeviceLending`."""
        sharing = [placed for placed in self.replicas if placed.shares_device]
        shared = [name for placed in sharing for name in placed.devices]
        policy = RecordedPolicy(lending_policy(self.seamless.lending), self.seamless.lending, self.folder / RECORDING)
        views = DeviceViews(self._devices(), self.plane.observe)
        switching = partial(device_time.doing, DeviceUse.SWITCH, shared)
        given = (self.plane, sharing, policy, views, progress, wait_for_group, switching, before_computation)
        if self.placement.handover is Handover.RESIDENT:
            return ResidentLending(*given)
        keeps_weights = self.placement.handover is Handover.CACHE_ONLY
        command = "put_cache_away" if keeps_weights else "sleep"
        calls = ServerCalls(command, self.seamless.watchdog.transition_s, commands=True)
        put_away = partial(put_caches_away if keeps_weights else put_to_sleep, calls, sharing)
        return ReleasedLending(*given, put_away=put_away, load=commit.load_again)

    def group_wait(
        self, feed: PromptFeed, lending: DeviceLending, starter: ReplicaStarter, commit: WeightCommit, poll_s: float
    ) -> GroupWait:
        return GroupWait(
            self.plane,
            feed,
            lending=lending,
            starter=starter,
            load=commit.load_started,
            waited=lambda since: commit.times.trainer_waited(since, for_loads=False),
            poll_s=poll_s,
        )


def put_to_sleep(calls: ServerCalls, replicas: Sequence[PlacedReplica]) -> None:
    """Puts weights and KV caches of these replicas away. One that is dead has none, one that hangs keeps them."""
    servers = {
        name: server
        for placed in replicas
        for name, server in numbered(placed.replica_id, placed.replica.servers).items()
    }
    for name, call in calls.call(servers).items():
        try:
            ray.get(call.reply)
        except ray.exceptions.ActorUnavailableError:
            raise  # its process may live, and keep the memory
        except ACTOR_GONE as error:
            logger.warning("%s is dead, and has no memory to put away: %s", name, death_reason(error))


def put_caches_away(calls: ServerCalls, replicas: Sequence[PlacedReplica]) -> None:
    """Puts the KV caches of these replicas away; they keep their weights. One that is dead has none, one that hangs
    keeps its own."""
    list(living_replies(calls.call({placed.replica_id: placed.replica.server_handle for placed in replicas}).values()))
