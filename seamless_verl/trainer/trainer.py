"""The `seamless` trainer: one asynchronous PPO trainer for every layout.

Built on verl's PPOTrainer, which asks for no standalone pool, so that colocated, disaggregated and
multiplexed layouts differ in data and not in class. State it owns: the weight version, which is
verl's `global_steps` at the last commit, and the validation curve.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer
from verl.workers.rollout.replica import RolloutReplica

from seamless_verl.config.checks.settings import Settings
from seamless_verl.config.planning import plan_of
from seamless_verl.config.schema import Handover, KvOnUpdate, SeamlessConfig
from seamless_verl.resources.ledger import Kind
from seamless_verl.resources.lending import Demand, lending_policy
from seamless_verl.resources.placement import ReplicaKind
from seamless_verl.resources.staleness import StalenessBound
from seamless_verl.trainer.commit import Transfer, WeightCommit
from seamless_verl.trainer.curve import ValidationCurve
from seamless_verl.trainer.data_plane.link import PlaneLink
from seamless_verl.trainer.device_time import DeviceTime, TakenThere, train_device
from seamless_verl.trainer.devices import Devices, Released, Shared
from seamless_verl.trainer.freshness import keep_fresh
from seamless_verl.trainer.host import rebound
from seamless_verl.trainer.partial import saving
from seamless_verl.trainer.pools import TagPools, place_by_tags
from seamless_verl.trainer.replay_buffer import SeamlessReplayBuffer
from seamless_verl.trainer.replica.server import SeamlessReplica
from seamless_verl.trainer.servers import FirstRanks, SeamlessServers
from seamless_verl.trainer.startup import Concurrently
from seamless_verl.trainer.workers import SeamlessActorWorker, SeamlessCriticWorker, SeamlessWorkerGroup
from seamless_verl.trajectory.policies import policy

UNRUNG_S = 10.0  # nothing depends on it: a look costs a millisecond
TRAIN_ALL = "train_all"
ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy)


@register_trainer("seamless")
class SeamlessTrainer(PPOTrainer):
    """PPO with generation and training overlapped as far as `seamless.max_staleness` allows."""

    def __init__(self, config: DictConfig) -> None:
        self.seamless = SeamlessConfig.parse(config.get("seamless"))
        rollout = config.actor_rollout_ref.rollout
        self.layout = self.seamless.layout_for(rollout.nnodes, rollout.n_gpus_per_node)
        accelerator = config.trainer.device != "cpu"
        tagged = self.seamless.resources is not None
        self.plan = plan_of(Settings.of(config, devices=None, accelerator=accelerator)) if tagged else None
        self.pools: TagPools | None = None
        self._enable_hybrid_replicas = self.layout.shares_devices  # read by verl's _setup
        self.handover = handover_of(self.seamless.handover, config)
        self.policy = policy(self.seamless.tokens.policy, self.seamless.tokens.older_than)
        self.curve = ValidationCurve.beside(config.trainer.default_local_dir)
        self.commit: WeightCommit
        self.devices: Devices
        self.device_time: DeviceTime
        self.servers: SeamlessServers
        self.link: PlaneLink
        self.launched: Concurrently[SeamlessServers]
        self.heard = 0  # groups that had ended when we last looked
        self.seconds_between_looks = UNRUNG_S  # the task runner knows of loops that do not ring
        self.reached: Callable[[str], None] = lambda stage: None  # who watches the run, set by the task runner
        self.when_rewards_are_up: Callable[[], None] = lambda: None  # set by the task runner
        super().__init__(config)

    def _build_replay_buffer(self) -> SeamlessReplayBuffer:
        updates = self.parameter_sync_step
        batch = self.config.data.train_batch_size // updates
        self.bound = StalenessBound(self.seamless.max_staleness, batch, updates)
        return SeamlessReplayBuffer(
            bound=self.bound,
            update=lambda: self.local_trigger_step,
            wait=self._wait_for_groups,
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.get(self.trainer_mode, {}),
            sampler_kwargs=self.config.trainer.v1.sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
            filter_groups_metric=self._resolve_filter_groups_metric(),
        )

    def _wait_for_groups(self) -> None:
        """Return when a group has ended since the last time, or after a while in which none has."""
        self.heard = ray.get(self.link.actor.rung.remote(self.heard, self.seconds_between_looks))

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        classes = dict.fromkeys(ACTOR_ROLES, SeamlessActorWorker) | {Role.Critic: SeamlessCriticWorker}
        for role in self.role_worker_mapping:
            if role in classes:
                self.role_worker_mapping[role] = ray.remote(classes[role])
        if self.plan is not None:
            self.pools = place_by_tags(self, self.plan, wait_s=self.seamless.wait_for_machines_s)

    def _setup(self) -> None:
        self.link = PlaneLink(self.config, self.seamless)
        SeamlessWorkerGroup.on_spawn = self._start_servers
        with rebound(trainer_base, RayWorkerGroup=SeamlessWorkerGroup, LLMServerManager=StartedServers(self)):
            super()._setup()
        servers = self.launched.result()
        self.link.attach(servers.placed, keep_kv=self.seamless.weights.kv is KvOnUpdate.KEEP)
        sharing = [one for one in servers.placed if one.shares_device]
        alone = [one.replica for one in servers.placed if not one.shares_device]
        self.device_time = self._device_time(servers)
        shared = [device for one in sharing for device in one.devices]
        switching = partial(self.device_time.doing, Kind.SWITCH, shared)
        lending = lending_policy(self.seamless.lending)
        shares = (self.link.actor, sharing, lending, self._demand, switching)
        if self.handover is Handover.SHARED:
            self.devices = Shared(*shares)
        else:
            self.devices = Released(*shares, sleep=self.checkpoint_manager.sleep_replicas)
        self.devices.guard(self)
        engine = omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine)
        transfer = Transfer(engine, self.actor_rollout_wg, alone) if alone else None
        self.commit = WeightCommit(
            self.link.actor,
            self.actor_rollout_wg,
            servers.placed,
            transfer,
            at_once=self.seamless.weights.at_once,
            released=self.handover is Handover.RELEASED,
            syncing=partial(self.device_time.doing, Kind.SYNC),
        )

    def _demand(self) -> Demand:
        """What training waits for, in groups, as far as the last look at the queue told."""
        needed = self.bound.batch
        left = needed * max(0, self.parameter_sync_step - self.local_trigger_step - 1) or needed
        return Demand(ready=self.replay_buffer.finished(), needed=needed, left_in_step=left)

    def _device_time(self, servers: SeamlessServers) -> DeviceTime:
        training = [train_device(i) for i in range(self.actor_rollout_wg.world_size)]
        alone = [device for one in servers.placed if not one.shares_device for device in one.devices]
        handles = [one.replica.server_handle for one in servers.placed]

        def ask() -> list[TakenThere]:
            asked = [handle.take_activity.remote() for handle in handles]
            groups = [self.actor_rollout_wg, *([self.critic_wg] if self.use_critic else [])]
            return [there for group in groups for there in group.take_activity()] + ray.get(asked)

        return DeviceTime(Path(self.config.trainer.default_local_dir), [*training, *alone], ask)

    def _start_servers(self, groups: dict[str, Any]) -> None:
        """Launch the replicas beside the trainer's engines, once their processes exist.

        Not on an accelerator that both would share: vLLM sizes its cache by the memory it finds free.
        """
        actors = next((group for role, group in groups.items() if role.startswith("actor")), None)
        if actors is None or hasattr(self, "servers"):
            return
        sharing = FirstRanks(actors.workers[: self._generating(actors.world_size)])
        self.servers = SeamlessServers(self.config, self.layout, sharing, SeamlessReplica, self.pools)
        self.servers.open_balancer()
        if not self.layout.shares_devices or self.config.trainer.device == "cpu":
            self.launched = Concurrently("rollout", self.servers.launch)

    def _generating(self, world: int) -> int:
        """How many of the trainer's ranks, the first ones, are on devices that generate too."""
        if self.plan is None:
            return world
        return sum(len(replica.devices) for replica in self.plan.replicas_of(ReplicaKind.HYBRID))

    def launch_servers(self) -> Concurrently[SeamlessServers]:
        """The launch of the replicas when verl's set-up reaches them: begun by now, or begun here."""
        self.when_rewards_are_up()
        if not hasattr(self, "launched"):
            self.launched = Concurrently("rollout", self.servers.launch)
        return self.launched

    def where(self) -> dict[str, Any]:
        """The actors that can be asked where they are, by name."""
        servers = {one.replica_id: one.replica.server_handle for one in getattr(self.servers, "placed", [])}
        return {"rollout manager": self.link.actor, **servers}

    def get_llm_client(self) -> Any:
        return self.servers.client()

    def _rollout_server_managers(self) -> list[Any]:
        return [self.servers]

    def _get_n_gpus_for_throughput(self) -> int:
        alone = (one.replica.world_size for one in self.servers.placed if not one.shares_device)
        return int(self.resource_pool_manager.get_n_gpus() + sum(alone))

    def on_init_end(self) -> None:
        self.commit(self.global_steps)  # of the checkpoint just loaded, or of the initial model

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self.curve.truncate_after(self.global_steps)

    def _save_checkpoint(self) -> None:
        self.reached(f"saving, step {self.global_steps}")
        with saving(self.config.trainer.default_local_dir, self.global_steps):
            super()._save_checkpoint()

    def on_train_begin(self) -> None:
        self.device_time.begin()
        self._add_async_warmup_batches(self.seamless.batches_ahead)

    def prepare_step(self) -> dict[str, Any]:
        """Submit one batch, or what the bound has room for after a resume under a smaller one."""
        room = self.bound.room(self.replay_buffer.outstanding(), self.seamless.batches_ahead)
        if room >= self.config.data.train_batch_size:
            return dict(super().prepare_step())
        if room:
            self._add_prompts_to_generate(room)
        return {}

    def on_sample_begin(self) -> None:
        self.reached(f"waiting for groups, step {self.global_steps}")
        self.devices.offer(None)

    def on_sample_end(self) -> None:
        self.reached(f"computing, step {self.global_steps}")
        if self.curr_step_profile:
            self._stop_rollout_profiling()

    def on_step_end(self) -> None:
        self.reached(f"committing version {self.global_steps}")
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self.devices.offer(None)  # the next computation is a batch away
            self._pending_sync_metrics = self.commit(self.global_steps)
            self.devices.committed()
        self._pending_sync_metrics |= self.device_time.close(f"step {self.global_steps}")
        self._pending_sync_metrics |= self.devices.metrics()

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.seamless.tokens.policy != TRAIN_ALL:
            metrics.update(keep_fresh(batch, self.policy, self.global_steps - 1))
        batch = super()._compute_old_log_prob(batch, metrics)
        if not self.config.algorithm.rollout_correction.bypass_mode:  # there they are the same numbers
            metrics.update(logprob_difference(batch))
        return batch

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self.devices.training("train_mini_batch"):  # verl starts the update and waits for it inside
            return super()._update_critic(batch, metrics)

    def _validate(self) -> dict[str, float]:
        self.reached(f"validating, step {self.global_steps}")
        self.devices.offer(None)
        metrics: dict[str, float] = super()._validate()
        self.reached(f"validated, step {self.global_steps}")
        self.curve.add(self.global_steps, metrics)
        return metrics


def handover_of(asked: Handover, config: DictConfig) -> Handover:
    """SHARED or RELEASED."""
    if asked is not Handover.AUTO:
        return asked
    releases = config.trainer.device != "cpu" and config.actor_rollout_ref.rollout.free_cache_engine
    return Handover.RELEASED if releases else Handover.SHARED


class StartedServers:
    """verl's LLMServerManager as `_setup` calls it. What verl puts to sleep there before it loads a checkpoint
    are replicas that release their memory; the others need not even be waited for yet."""

    def __init__(self, trainer: SeamlessTrainer) -> None:
        self.trainer = trainer
        self.sleeping: list[RolloutReplica] = []

    def create(self, **_: Any) -> StartedServers:
        launched = self.trainer.launch_servers()
        if self.trainer.handover is Handover.RELEASED:
            self.sleeping = [one.replica for one in launched.result().placed if one.shares_device]
        return self

    create_empty = create

    def get_replicas(self) -> list[RolloutReplica]:
        return self.sleeping


def logprob_difference(batch: Any) -> dict[str, float]:
    """The largest |logprob| difference of trainer and rollout over the generated tokens of a batch."""
    fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    if "rollout_log_probs" not in data:
        return {}
    old, rollout, mask = (data[field].values() for field in fields)
    difference = (old - rollout).abs() * mask
    return {"training/rollout_logprob_diff_max": float(difference.max())}
