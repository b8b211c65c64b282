"""Sets up a `seamless` run: from its config to a trainer whose engines and replicas run.

verl's `_setup` works in its own order; parts that are independent of each other are started together here. Owns what
is made once for a run: the data plane client, the replicas, the lending of devices and the commit of weights.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig, open_dict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.utils.config import omega_conf_to_dataclass

from seamless_verl.config.planning import choose_handover, plan_of
from seamless_verl.config.schema import Handover, KvOnUpdate, SeamlessConfig
from seamless_verl.config.settings import Settings
from seamless_verl.data_plane.client import DataPlaneClient, PlacedReplica, living_replies
from seamless_verl.data_plane.server_calls import ServerCalls
from seamless_verl.journal.recorded import parse_policy
from seamless_verl.platform.adaptation import rebound
from seamless_verl.replica.server import SeamlessReplica
from seamless_verl.resources.ledger.activity import DeviceUse, NodeActivity
from seamless_verl.resources.lending import lending_policy
from seamless_verl.resources.lending.policy import LendingPolicy
from seamless_verl.resources.lending.recording import RecordedPolicy
from seamless_verl.resources.machines import Machine
from seamless_verl.resources.placement import ReplicaKind
from seamless_verl.runtime.actor_death import ACTOR_GONE, death_reason
from seamless_verl.runtime.process import BackgroundTask
from seamless_verl.runtime.sample_lengths import LengthRecord
from seamless_verl.runtime.step_metrics import StepMetrics
from seamless_verl.trainer.deaths import numbered
from seamless_verl.trainer.description import describe
from seamless_verl.trainer.device_time import DeviceTime, LostSource, server_reports, train_device
from seamless_verl.trainer.earlier_checkpoints import resumed_checkpoint
from seamless_verl.trainer.fetched_batch import AheadOfUpdate
from seamless_verl.trainer.lending import UPDATE, DeviceLending, ReleasedLending, ResidentLending
from seamless_verl.trainer.lending_view import DeviceViews, RunDevices
from seamless_verl.trainer.needed_nodes import nodes_of_run
from seamless_verl.trainer.pools import TagPools, place_by_tags
from seamless_verl.trainer.prompt_lengths import prompt_scans, warn_of_long_prompts
from seamless_verl.trainer.replica_starts import ReplicaStarter, noticed_s
from seamless_verl.trainer.sampled_prompts import SamplingTrainer
from seamless_verl.trainer.scheduling_checkpoint import RECORDING
from seamless_verl.trainer.servers import FirstRanks, SeamlessServers, StartedServers
from seamless_verl.trainer.validation_curve import ValidationCurve
from seamless_verl.trainer.workers import SeamlessActorWorker, SeamlessCriticWorker, SeamlessWorkerGroup
from seamless_verl.weights.commit import Transfer, WeightCommit

logger = logging.getLogger(__name__)
SUBSETS = ("train_max_samples", "val_max_samples")  # of `data`
ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy)


class TrainerSetup(SamplingTrainer):
    """verl's trainer with our pools, workers, replicas and buffer in the place of verl's."""

    def __init__(self, config: DictConfig) -> None:
        self.seamless = SeamlessConfig.parse(config.get("seamless"))
        rollout = config.actor_rollout_ref.rollout
        self.layout = self.seamless.layout_for(rollout.nnodes, rollout.n_gpus_per_node)
        settings = Settings.of(config, devices=None, accelerator=config.trainer.device != "cpu")
        self.plan = None if self.seamless.resources is None else plan_of(settings)
        self.pools: TagPools | None = None
        self._enable_hybrid_replicas = self.layout.shares_devices  # read by verl's _setup
        self.handover = choose_handover(settings).handover
        self.token_policy = parse_policy(self.seamless.tokens.policy)
        self.weighs_sessions = self.seamless.tokens.weigh == "session"
        self.group_details = defaultdict[str, dict[str, Any]](dict)  # by prompt, of this step's groups, for the journal
        self.saved: list[int] = []  # steps whose checkpoints this run saved, and did not remove
        self.curve = ValidationCurve.beside(config.trainer.default_local_dir)
        self.step_metrics = StepMetrics.beside(config.trainer.default_local_dir)
        if self.seamless.record:
            self.lengths = LengthRecord.beside(config.trainer.default_local_dir)
        describe(config, self.seamless, self.layout).write(Path(config.trainer.default_local_dir))
        self.commit: WeightCommit
        self.lending: DeviceLending
        self.device_time: DeviceTime
        self.servers: SeamlessServers
        self.starter: ReplicaStarter
        self.data_plane: DataPlaneClient
        self.server_launch: BackgroundTask[SeamlessServers]
        self.enter_stage: Callable[[str], None] = lambda stage: None  # of the watchdog, set by the task runner
        self.watch_metrics: Callable[[], dict[str, float]] = dict  # of the watchdog, too
        self.on_rewards_ready: Callable[[], None] = lambda: None  # set by the task runner
        super().__init__(config)

    def _init_dataloader(self) -> None:
        """Also counts the prompts that are too long, in the background, if verl's own agent loops render them."""
        self._choose_seed()
        super()._init_dataloader()
        sets = {"data.train_files": self.train_dataset, "data.val_files": self.val_dataset}
        scanned = {} if self.seamless.gateway.enabled else sets
        limit = self.config.actor_rollout_ref.rollout.prompt_length
        self.prompt_scan = BackgroundTask("prompt-scan", partial(warn_of_long_prompts, prompt_scans(scanned), limit))

    def _choose_seed(self) -> None:
        """Where verl draws a subset of the data without `data.seed`, the seed is that of the run's first start.

        The order of the data needs none: verl's generator begins the same without a seed.
        """
        if (checkpoint := resumed_checkpoint(self.config)) is not None:
            self.names.load(checkpoint)
        if (given := self.config.data.get("seed")) is not None:
            self.names.seed = int(given)
            return
        if not any(int(self.config.data.get(name, -1)) > 0 for name in SUBSETS):
            return
        with open_dict(self.config):
            self.config.data.seed = self.names.seed
        logger.info("data.seed=null: this run draws its subset with seed %d, also when it is resumed", self.names.seed)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        classes = dict.fromkeys(ACTOR_ROLES, SeamlessActorWorker) | {Role.Critic: SeamlessCriticWorker}
        for role in self.role_worker_mapping:
            if role in classes:
                self.role_worker_mapping[role] = ray.remote(classes[role])
        if self.plan is not None:
            self.pools = place_by_tags(self, self.plan, wait_s=self.seamless.wait_for_machines_s)

    def _setup(self) -> None:
        self.data_plane = DataPlaneClient(self.config, self.seamless, nodes_of_run(self.config))
        SeamlessWorkerGroup.on_spawn = self._start_servers
        started = StartedServers(
            self.launch_servers, released=self.handover.cuts_calls, awaited=self._share_accelerators
        )
        with rebound(trainer_base, RayWorkerGroup=SeamlessWorkerGroup, LLMServerManager=started):
            super()._setup()
        replicas = self.server_launch.result().placed
        keep_kv = self.seamless.weights.kv is KvOnUpdate.KEEP
        self.data_plane.attach(replicas, keep_kv=keep_kv)
        self.data_plane.log_addresses()
        self.starter = ReplicaStarter(
            self.servers,
            self.data_plane,
            limit=self.seamless.restarts,
            noticed_s=noticed_s(self.seamless.watchdog),
            keep_kv=keep_kv,
            must_wait=lambda placed: placed.shares_device and self._share_accelerators,
            wait_staged=lambda: self.commit.wait_committed(),
            free_memory=lambda: self.actor_rollout_wg.free_cached_memory(),
        )
        self.generating = [device for placed in replicas for device in placed.devices]
        self.device_time = self._device_time(replicas)
        self.lending = self._lending(replicas)
        self.lending.wrap_computations(self, {UPDATE: AheadOfUpdate})
        self.commit = self._commit(replicas)

    def _before_computation(self) -> None:
        self.await_deferred()  # else devices might be lent for what is being ended
        self.commit.wait_for_devices()

    def _lending(self, replicas: Sequence[PlacedReplica]) -> DeviceLending:
        sharing = [placed for placed in replicas if placed.shares_device]
        devices = RunDevices(
            {placed.replica_id: placed.devices for placed in sharing},
            {placed.replica_id: placed.devices for placed in replicas if not placed.shares_device},
            tuple(train_device(i) for i in range(self.actor_rollout_wg.world_size)),
        )
        arguments = (
            self.data_plane,
            sharing,
            self._lending_policy(),
            DeviceViews(devices, self.data_plane.observe),
            self.progress,
            self.wait_for_more,
            partial(
                self.device_time.doing, DeviceUse.SWITCH, [name for own in devices.shared.values() for name in own]
            ),
            self._before_computation,
        )
        if self.handover is Handover.RESIDENT:
            return ResidentLending(*arguments)
        keeps_weights = self.handover is Handover.CACHE_ONLY
        command = "put_cache_away" if keeps_weights else "sleep"
        calls = ServerCalls(command, self.seamless.watchdog.transition_s, commands=True)
        put_away = partial(put_caches_away if keeps_weights else put_to_sleep, calls, sharing)
        return ReleasedLending(*arguments, put_away=put_away, load=lambda ids: self.commit.load_again(ids))

    def _lending_policy(self) -> LendingPolicy:
        policy = lending_policy(self.seamless.lending)
        if not self.seamless.record:
            return policy
        return RecordedPolicy(policy, self.seamless.lending, Path(self.config.trainer.default_local_dir, RECORDING))

    def _commit(self, replicas: Sequence[PlacedReplica]) -> WeightCommit:
        engine = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        standalone = [placed.replica for placed in replicas if not placed.shares_device]
        return WeightCommit(
            self.data_plane,
            self.actor_rollout_wg,
            replicas,
            Transfer(engine, self.actor_rollout_wg, standalone) if standalone else None,
            released=self.handover.cuts_calls,
            syncing=partial(self.device_time.doing, DeviceUse.SYNC),
            hosts=self.data_plane.hosts,
        )

    def _device_time(self, replicas: Sequence[PlacedReplica]) -> DeviceTime:
        training = [train_device(i) for i in range(self.actor_rollout_wg.world_size)]
        generating = [device for placed in replicas if not placed.shares_device for device in placed.devices]

        calls = ServerCalls("take_activity")

        def collect() -> list[NodeActivity | LostSource]:
            servers = {placed.replica_id: placed.replica.server_handle for placed in replicas}
            calls.begin(servers)
            groups = [self.actor_rollout_wg, *([self.critic_wg] if self.use_critic else [])]
            training_reports = [report for group in groups for report in group.take_activity()]
            return [*training_reports, *server_reports(calls, servers)]

        return DeviceTime(Path(self.config.trainer.default_local_dir), [*training, *generating], collect)

    def _start_servers(self, groups: dict[str, Any]) -> None:
        """Launches the replicas while the trainer's engines start, as soon as their processes exist.

        If both share an accelerator, `launch_servers` does it later: vLLM sizes its cache by the memory it finds free.
        """
        actors = next((group for role, group in groups.items() if role.startswith("actor")), None)
        if actors is None or hasattr(self, "servers"):
            return
        sharing = FirstRanks(actors.workers[: self._generating_ranks(actors.world_size)])
        self.servers = SeamlessServers(self.config, self.layout, sharing, SeamlessReplica, self.pools)
        self.servers.open_balancer()
        if not self._share_accelerators:
            self.server_launch = BackgroundTask("rollout", self.servers.launch)

    @property
    def _share_accelerators(self) -> bool:
        """Whether replicas and trainer take memory of the same accelerators."""
        return self.layout.shares_devices and self.config.trainer.device != "cpu"

    def _generating_ranks(self, world: int) -> int:
        """How many of the trainer's ranks, counted from the first, are on devices that also generate."""
        if self.plan is None:
            return world
        return sum(len(replica.devices) for replica in self.plan.replicas_of(ReplicaKind.HYBRID))

    def launch_servers(self) -> BackgroundTask[SeamlessServers]:
        """The launch of the replicas, at the point where verl's set-up needs them; starts it if it has not begun."""
        self.on_rewards_ready()
        if not hasattr(self, "server_launch"):
            self.server_launch = BackgroundTask("rollout", self.servers.launch)
        return self.server_launch

    def watched_actors(self) -> dict[str, Any]:
        """The actors that give a stack report, by name."""
        replicas: list[PlacedReplica] = getattr(self.servers, "placed", [])
        servers = {placed.replica_id: placed.replica.server_handle for placed in replicas}
        return {"data plane": self.data_plane.actor, **servers}

    def training_actors(self) -> dict[str, Any]:
        """The workers that compute, by name: the run ends when one of them dies."""
        groups = {"actor": self.actor_rollout_wg, "critic": self.critic_wg if self.use_critic else None}
        named = (numbered(f"{role} worker", group.workers) for role, group in groups.items() if group is not None)
        return {name: actor for workers in named for name, actor in workers.items()}

    def machines_by_node(self) -> dict[str, list[Machine]]:
        """The machines of the plan that are on each node, by its id; none without tags."""
        return {} if self.pools is None else self.pools.machines_by_node()

    def get_llm_client(self) -> Any:
        return self.servers.client()

    def _rollout_server_managers(self) -> list[Any]:
        return [self.servers]

    def _get_n_gpus_for_throughput(self) -> int:
        standalone = (placed.replica.world_size for placed in self.servers.placed if not placed.shares_device)
        return int(self.resource_pool_manager.get_n_gpus() + sum(standalone))


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
