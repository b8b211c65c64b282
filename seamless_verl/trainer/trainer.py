"""The `seamless` trainer: one asynchronous PPO trainer for every layout.

Built on verl's PPOTrainer, which asks for no standalone pool, so that colocated, disaggregated and
multiplexed layouts differ in data and not in class. State it owns: the weight version, which is
verl's `global_steps` at the last commit, and the validation curve.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils.debug import marked_timer
from verl.workers.rollout.llm_server import LLMServerManager

from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.errors import ConfigError
from seamless_verl.resources.tags import Layout
from seamless_verl.trainer.curve import ValidationCurve
from seamless_verl.trainer.host import rebound
from seamless_verl.trainer.layouts import Colocated, Disaggregated, RolloutPlace
from seamless_verl.trainer.partial import saving
from seamless_verl.trainer.replay_buffer import SeamlessReplayBuffer
from seamless_verl.trainer.servers import SeamlessServers
from seamless_verl.trainer.staleness import StalenessBound
from seamless_verl.trainer.startup import Concurrently
from seamless_verl.trainer.workers import SeamlessActorWorker, SeamlessCriticWorker, SeamlessWorkerGroup

if TYPE_CHECKING:
    from seamless_verl.trainer.data_plane.link import PlaneLink

ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy)


@register_trainer("seamless")
class SeamlessTrainer(PPOTrainer):
    """PPO with generation and training overlapped as far as `seamless.max_staleness` allows."""

    def __init__(self, config: DictConfig) -> None:
        self.seamless = SeamlessConfig.parse(config.get("seamless"))
        rollout = config.actor_rollout_ref.rollout
        self.layout = self.seamless.layout_for(rollout.nnodes, rollout.n_gpus_per_node)
        if self.layout is Layout.MULTIPLEXED:
            way_out = "Tag all machines [train, rollout], or some train and others rollout"
            raise ConfigError("seamless.layout", "multiplexed", "the trainer does not multiplex yet", way_out)
        self._enable_hybrid_replicas = self.layout is Layout.COLOCATED  # read by verl's _setup
        self.curve = ValidationCurve.beside(config.trainer.default_local_dir)
        self.place: RolloutPlace
        self.servers: SeamlessServers
        self.link: PlaneLink | None = None
        self.launched: Concurrently[SeamlessServers]
        self.when_rewards_are_up: Callable[[], None] = lambda: None  # set by the task runner
        super().__init__(config)

    def _build_replay_buffer(self) -> SeamlessReplayBuffer:
        updates = self.parameter_sync_step
        batch = self.config.data.train_batch_size // updates
        self.bound = StalenessBound(self.seamless.max_staleness, batch, updates)
        return SeamlessReplayBuffer(
            bound=self.bound,
            update=lambda: self.local_trigger_step,
            trainer_mode=self.trainer_mode,
            trainer_config=self.config.trainer.v1.get(self.trainer_mode, {}),
            sampler_kwargs=self.config.trainer.v1.sampler.sampler_kwargs,
            refill_fn=self._add_prompts_to_generate,
            filter_groups_metric=self._resolve_filter_groups_metric(),
        )

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        classes = dict.fromkeys(ACTOR_ROLES, SeamlessActorWorker) | {Role.Critic: SeamlessCriticWorker}
        for role in self.role_worker_mapping:
            if role in classes:
                self.role_worker_mapping[role] = ray.remote(classes[role])

    def _setup(self) -> None:
        SeamlessWorkerGroup.on_spawn = self._start_servers
        with rebound(trainer_base, RayWorkerGroup=SeamlessWorkerGroup, LLMServerManager=StartedServers(self)):
            super()._setup()
        servers = self.launched.result()
        if self.layout is Layout.COLOCATED:
            self.place = Colocated(servers, self.checkpoint_manager)
        else:
            self.place = Disaggregated.of(servers, self.config, self.actor_rollout_wg)
        if self.link is not None:
            self.place = self.link.join(self.place)

    def _start_servers(self, groups: dict[str, Any]) -> None:
        """Launch the replicas beside the trainer's engines, once their processes exist.

        Not on an accelerator that both would share: vLLM sizes its cache by the memory it finds free.
        """
        actors = next((group for role, group in groups.items() if role.startswith("actor")), None)
        if actors is None or hasattr(self, "servers"):
            return
        colocated = self.layout is Layout.COLOCATED
        if self.seamless.gateway.enabled:
            from seamless_verl.trainer.data_plane.link import PlaneLink  # and with it vLLM's serving classes

            self.link = PlaneLink(self.config, self.seamless.gateway)
        group = actors if colocated else None
        self.servers = SeamlessServers(self.config, worker_group=group, with_doors=self.link is not None)
        self.servers.open_balancer()
        if not colocated or self.config.trainer.device == "cpu":
            self.launched = Concurrently("rollout", self.servers.launch)

    def launch_servers(self) -> SeamlessServers:
        """The replicas when verl's set-up reaches them: launched by now, or launched here."""
        self.when_rewards_are_up()
        if not hasattr(self, "launched"):
            self.launched = Concurrently("rollout", self.servers.launch)
        return self.launched.result()

    def get_llm_client(self) -> Any:
        return self.servers.client()

    def _rollout_server_managers(self) -> list[Any]:
        return [self.place.servers]

    def _get_n_gpus_for_throughput(self) -> int:
        rollout = self.config.actor_rollout_ref.rollout
        alone = 0 if self.layout is Layout.COLOCATED else rollout.nnodes * rollout.n_gpus_per_node
        return int(self.resource_pool_manager.get_n_gpus() + alone)

    def on_init_end(self) -> None:
        self.place.commit(self.global_steps)  # of the checkpoint just loaded, or of the initial model

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self.curve.truncate_after(self.global_steps)

    def _save_checkpoint(self) -> None:
        with saving(self.config.trainer.default_local_dir, self.global_steps):
            super()._save_checkpoint()

    def on_train_begin(self) -> None:
        self._add_async_warmup_batches(self.seamless.max_staleness)

    def prepare_step(self) -> dict[str, Any]:
        """Submit one batch, or what the bound has room for after a resume under a smaller one."""
        room = self.bound.room(self.replay_buffer.outstanding())
        if room >= self.config.data.train_batch_size:
            return dict(super().prepare_step())
        if room:
            self._add_prompts_to_generate(room)
        return {}

    def on_sample_end(self) -> None:
        self.place.before_training()
        if self.curr_step_profile:
            self._stop_rollout_profiling()

    def on_step_end(self) -> None:
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self._pending_sync_metrics = self.place.commit(self.global_steps)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_old_log_prob(batch, metrics)
        if not self.config.algorithm.rollout_correction.bypass_mode:  # there they are the same numbers
            metrics.update(logprob_difference(batch))
        return batch

    def _validate(self) -> dict[str, float]:
        metrics: dict[str, float] = super()._validate()
        self.curve.add(self.global_steps, metrics)
        return metrics


class StartedServers:
    """verl's LLMServerManager as `_setup` calls it, for replicas that may have been started already."""

    def __init__(self, trainer: SeamlessTrainer) -> None:
        self.trainer = trainer

    def create(self, **_: Any) -> SeamlessServers:
        return self.trainer.launch_servers()

    def create_empty(self, **kwargs: Any) -> LLMServerManager:
        """The trainer's own devices have no replicas; those of the pool need not be waited for yet."""
        self.trainer.when_rewards_are_up()
        return LLMServerManager.create_empty(**kwargs)


def logprob_difference(batch: Any) -> dict[str, float]:
    """The largest |logprob| difference of trainer and rollout over the generated tokens of a batch."""
    fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    if "rollout_log_probs" not in data:
        return {}
    old, rollout, mask = (data[field].values() for field in fields)
    difference = (old - rollout).abs() * mask
    return {"training/rollout_logprob_diff_max": float(difference.max())}
