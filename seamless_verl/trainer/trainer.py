"""The `seamless` trainer: one asynchronous PPO trainer for every layout, whose hooks stand in the order of a run.

It extends verl's PPOTrainer, which needs no standalone pool, so that layouts differ in data and not in class. verl
calls the hooks; what they do is done by parts with one job each, which the trainer owns, and which do not know it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, register_trainer
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer

from seamless_verl.agent_loops.assignments import TRAIN
from seamless_verl.agent_loops.manager import SeamlessAgentLoopManager
from seamless_verl.agent_loops.rows import has_old_logprobs
from seamless_verl.config.schema import KvOnUpdate, SeamlessConfig
from seamless_verl.data_plane.client import DataPlaneClient
from seamless_verl.journal import GroupOutcome
from seamless_verl.platform.adaptation import rebound
from seamless_verl.runtime.process import BackgroundTask, freeze_imports
from seamless_verl.runtime.sample_lengths import LengthRecord
from seamless_verl.runtime.scores import without_unscored
from seamless_verl.runtime.step_metrics import StepMetrics
from seamless_verl.trainer.advantages import Advantages
from seamless_verl.trainer.checkpoints import (
    PROMPTS,
    SAMPLER,
    SCHEDULING,
    RunCheckpoints,
    Saved,
    SchedulingState,
    checkpoint_of,
    load_state,
)
from seamless_verl.trainer.deaths import numbered
from seamless_verl.trainer.failure_shares import FailureShares
from seamless_verl.trainer.finite_updates import KEYS
from seamless_verl.trainer.instruments import of_update
from seamless_verl.trainer.lending import UPDATE as ACTORS_UPDATE
from seamless_verl.trainer.losses import COMPARED, UPDATE, update_numbers
from seamless_verl.trainer.needed_nodes import nodes_of_run
from seamless_verl.trainer.pools import TagPools, roles_by_tags
from seamless_verl.trainer.prefetch import BatchPrefetch
from seamless_verl.trainer.prometheus import RunCollector, serve
from seamless_verl.trainer.prompt_feed import RunCalls
from seamless_verl.trainer.prompt_lengths import prompt_scans, warn_of_long_prompts
from seamless_verl.trainer.prompt_names import (
    PromptNames,
    data_rows,
    drop_trained,
    drop_validation,
    stored_deferred,
)
from seamless_verl.trainer.replay_buffer import SeamlessReplayBuffer
from seamless_verl.trainer.servers import SeamlessServers
from seamless_verl.trainer.session_weight import mini_batches_of, optimizer_steps, rows_multiple
from seamless_verl.trainer.setup import Placement, RunSetup, ServerLaunch, choose_seed, describe, make_feed
from seamless_verl.trainer.shared_prefixes import ACTOR, CRITIC, share_of_update
from seamless_verl.trainer.step_log import REWARD, logging_of
from seamless_verl.trainer.token_mask import (
    COUNTS_OF_AGREEMENT,
    agreement,
    mask_stale,
    own_keys,
    rows_at,
    trained_columns,
)
from seamless_verl.trainer.validation import ValidationBeside
from seamless_verl.trainer.workers import SeamlessActorWorker, SeamlessCriticWorker, SeamlessWorkerGroup
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.policies import parse_policy
from seamless_verl.weights.update import Reach

logger = logging.getLogger(__name__)
KEEP_EARLIER = "It is not saved, so that the last checkpoint stays: the same command goes on from that"
ALL_MASKED = "seamless.tokens.policy=%s masks all tokens of this update, which trains nothing: permit older ones%s"
ACTOR_ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy)


@register_trainer("seamless")
class SeamlessTrainer(PPOTrainer):  # type: ignore[misc]
    """PPO with generation and training overlapped as far as `seamless.max_staleness` allows.

    Owned state: the weight version, which is verl's `global_steps` at the last commit, the validation curve, and what
    the journal is to know of a step's groups.
    """

    # Its start: verl calls __init__, init and in it _setup

    def __init__(
        self,
        config: DictConfig,
        *,
        enter_stage: Callable[[str], None],
        watch_metrics: Callable[[], dict[str, float]],
        on_rewards_ready: Callable[[], None],
        poll_s: float,
    ) -> None:
        """`enter_stage` and `watch_metrics` are the watchdog's; `poll_s` is the longest wait for groups at a time."""
        self.enter_stage, self.watch_metrics = enter_stage, watch_metrics
        self.on_rewards_ready, self.poll_s = on_rewards_ready, poll_s
        self.seamless = SeamlessConfig.parse(config.get("seamless"))
        self.placement = Placement.of(config, self.seamless)
        self._enable_hybrid_replicas = self.placement.layout.shares_devices  # read by verl's _setup
        self.pools: TagPools | None = None
        self.folder = Path(config.trainer.default_local_dir)
        describe(config, self.seamless, self.placement.layout).write(self.folder)
        self.names = PromptNames()
        self.step_metrics = StepMetrics.beside(config.trainer.default_local_dir)
        self.lengths = LengthRecord.beside(self.folder)
        self.failure_shares = FailureShares(self.seamless.gateway.failed_share)
        self.validation: ValidationBeside | None = None  # once the run trains
        self.checkpoints = RunCheckpoints(config, self._training_groups)
        self.token_policy = parse_policy(self.seamless.tokens.policy)
        self.weighs_sessions = self.seamless.tokens.weigh == "session"
        self.counted = Counter[str]()  # tokens of the step, as its metrics have them
        self.trains = True  # the update has a token to train
        self.group_details = defaultdict[str, dict[str, Any]](dict)  # by prompt, of this step's groups, for the journal
        self.advantages = Advantages(
            config.algorithm.adv_estimator,
            by_session=self.weighs_sessions,
            rejects=bool(config.algorithm.rollout_correction.rollout_rs),
            details=self.group_details if self.seamless.gateway.enabled else None,
            count_masked=self._count_masked,
        )
        super().__init__(config)

    def _build_replay_buffer(self) -> SeamlessReplayBuffer:
        """With what submits prompts to it."""
        calls = RunCalls(
            step=lambda: self.global_steps,
            update=lambda: self.local_trigger_step,
            steps_left=lambda: self.total_training_steps - self.global_steps,
            data_size=lambda: len(self.train_dataloader),
            dataset_size=lambda: len(self.train_dataset),
            add_prompts=lambda number: self._add_prompts_to_generate(number),
            submit=lambda prompts: self._submit_batch_to_rollout(prompts),
            begin_step=super().prepare_step,
            wait=lambda: self._await_groups(),
            manager=lambda: self.agent_loop_manager,
        )
        self.feed, self.sampled = make_feed(
            self.config,
            self.seamless,
            calls,
            updates=self.parameter_sync_step,
            lengths=self.lengths,
            filter_metric=self._resolve_filter_groups_metric(),
        )
        return self.feed.buffer

    def _setup(self) -> None:
        """From workers to replicas that are attached, with the parts that need them."""
        self.data_plane = DataPlaneClient(self.config, self.seamless, nodes_of_run(self.config))
        if self.seamless.metrics_port is not None:
            live = RunCollector(self.step_metrics.latest, self.data_plane.live)
            self.close_metrics = serve(self.seamless.metrics_port, live)
        if self.placement.plan is not None:
            self.pools = TagPools(self.placement.plan, wait_s=self.seamless.wait_for_machines_s)
        launch = self.server_launch = ServerLaunch(self.config, self.placement, self.pools, self.on_rewards_ready)
        workers = partial(SeamlessWorkerGroup, on_spawn=launch.workers_exist)
        with rebound(trainer_base, RayWorkerGroup=workers, LLMServerManager=launch):
            super()._setup()
        replicas, keep_kv = launch.result().placed, self.seamless.weights.kv is KvOnUpdate.KEEP
        self.data_plane.attach(replicas, keep_kv=keep_kv)
        self.data_plane.log_addresses()
        self.generating = [device for placed in replicas for device in placed.devices]
        groups = list(self._training_groups().values())
        setup = RunSetup(self.config, self.seamless, self.placement, self.data_plane, self.servers, groups)
        self.device_time = setup.device_time()
        self.commit = setup.commit(self.device_time)
        self.starter = setup.starter(self.commit, keep_kv=keep_kv)
        self.lending = setup.lending(
            self.device_time,
            self.commit,
            self.feed.progress,
            lambda: self.groups.wait_for_more(),
            self._before_computation,
        )
        computing = {name: getattr(self, name, None) for name in ("actor_rollout_wg", "ref_policy_wg")}
        self.shared_prefixes = setup.shared_prefixes({**computing, "critic_wg": getattr(self, "critic_wg", None)})
        self.lending.wrap_computations(computing, {ACTORS_UPDATE: BatchPrefetch})
        self.mismatch = setup.mismatch(self.feed.buffer.oldest_finished, self.commit, images=self.processor is not None)
        self.groups = setup.group_wait(self.feed, self.lending, self.starter, self.commit, self.poll_s)

    def _init_dataloader(self) -> None:
        """Also counts the prompts that are too long, in the background, if verl's own agent loops render them."""
        choose_seed(self.config, self.names)
        super()._init_dataloader()
        sets = {"data.train_files": self.train_dataset, "data.val_files": self.val_dataset}
        scanned = {} if self.seamless.gateway.enabled else sets
        limit = self.config.actor_rollout_ref.rollout.prompt_length
        self.prompt_scan = BackgroundTask("prompt-scan", partial(warn_of_long_prompts, prompt_scans(scanned), limit))

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        classes = dict.fromkeys(ACTOR_ROLES, SeamlessActorWorker) | {Role.Critic: SeamlessCriticWorker}
        for role in self.role_worker_mapping:
            if role in classes:
                self.role_worker_mapping[role] = ray.remote(classes[role])
        if self.pools is not None:
            self.mapping = roles_by_tags(self.pools.plan, self.mapping)
            self.resource_pool_manager = self.pools.trainer_manager(self.mapping)

    def get_llm_client(self) -> Any:
        return self.servers.client()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps:
            self.checkpoints.loaded(self.global_steps)
            drop_validation()
        self.step_metrics.resume_at(self.global_steps)

    def on_init_end(self) -> None:
        if self.global_steps:
            self.feed.tail.drew(self.global_steps * self.feed.step_prompts)  # where the checkpoint is of another mode
            parts = self._saved_parts()
            del parts[PROMPTS]  # which `choose_seed` has read, before it took a given data.seed
            load_state(checkpoint_of(self.config, self.global_steps), parts)
            self.feed.tail.keep(stored_deferred())
        if self.seamless.gateway.enabled:
            self.data_plane.begin_run(self.names.run, self.global_steps)
        self.commit.begin(self.global_steps)  # of the checkpoint just loaded, or of the initial model
        self.commit.wait()
        self.starter.begin()

    # The run: verl calls fit, which validates, submits what a checkpoint left unfinished, and makes its steps

    def fit(self, agent_loop_manager: Any) -> None:
        """Trains; the manager begins the generation of prompts when the version of the step before is committed."""
        if isinstance(agent_loop_manager, SeamlessAgentLoopManager):
            agent_loop_manager.may_begin = self.commit.then
        with logging_of(self.step_metrics, lambda: int(self.total_training_steps)):
            super().fit(agent_loop_manager)

    def _validate(self) -> dict[str, float]:
        """Beside training it only begins, before the last step; with the metrics of an earlier one that still ran."""
        earlier = {} if self.validation is None else self.validation.end()
        if self.validation is not None and self.global_steps < self.total_training_steps:
            if not isinstance(self.agent_loop_manager, SeamlessAgentLoopManager):
                self.commit.wait(Reach.COMMITTED)
            self.validation.begin(self.global_steps, super()._validate)
            return earlier
        if earlier:  # the last step's own are logged with it, and a logger may keep one value of a step
            self.logger.log(data=earlier, step=self.global_steps - 1)
        self.enter_stage(f"validating, step {self.global_steps}")
        self.commit.wait()
        self.lending.offer(None)
        metrics: dict[str, float] = super()._validate()
        self.enter_stage(f"validated, step {self.global_steps}")
        return metrics

    def _dump_generations(self, *args: Any, **kwargs: Any) -> None:
        """verl's; of a validation beside training under its step, where verl takes the present one."""
        now = self.global_steps
        if self.validation is not None and self.validation.works:
            self.global_steps = self.validation.step
        try:
            super()._dump_generations(*args, **kwargs)
        finally:
            self.global_steps = now

    def _val_metrics_update(
        self,
        data_sources: list[str],
        sample_uids: list[str],
        reward_extra_infos_dict: dict[str, list[Any]],
        sample_turns: list[Any],
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        """verl's, of the samples that have a score: one without counts nowhere, also not in `acc`, where verl takes a
        session that is missing for a 0."""
        scored, unscored = without_unscored(
            data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts or {}
        )
        metrics: dict[str, float] = super()._val_metrics_update(*scored)
        return metrics | {"seamless/validation/unscored": float(unscored)}

    def _reissue_inflight_prompts(self, partition_id: str = TRAIN) -> int:
        """Submits a checkpoint's unfinished prompts again: without a gateway all of them anew, as verl does."""

        def whole_groups() -> int:
            if self.seamless.gateway.enabled:
                return self.feed.resubmit(partition_id)
            drop_trained(partition_id)
            return int(super(SeamlessTrainer, self)._reissue_inflight_prompts(partition_id))

        return whole_groups() if self.sampled is None else self.sampled.reissue(whole_groups)

    def on_train_begin(self) -> None:
        self.prompt_scan.result()
        freeze_imports()
        self.device_time.begin()
        self.feed.ahead.begin()
        self._add_async_warmup_batches(self.feed.ahead.level)
        if self.seamless.evaluation == "beside":
            self.validation = ValidationBeside(self.feed.buffer, self._await_groups, self.enter_stage)

    # A step: prompts are submitted, then each update takes a batch of groups

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        self.counted.clear()
        self.step_result = super().step(metrics, timing_raw), metrics
        metrics.update(self.counted)  # of all updates of the step; verl has their means
        return self.step_result[0]

    def prepare_step(self) -> dict[str, Any]:
        return self.feed.prepare_step()

    def _next_train_batch(self, num_prompts: int | None = None) -> TensorDict:
        number = int(self.config.data.train_batch_size) if num_prompts is None else num_prompts
        return self._drawn(number) if self.sampled is None else self.sampled.next_batch(number, self._drawn)

    def _drawn(self, number: int) -> TensorDict:
        batch = super()._next_train_batch(number)
        self.feed.tail.drew(len(batch))
        return batch

    def _fetch_one_gen_batch(self) -> TensorDict:
        """With a gateway a prompt has the same uid after a resume, by which the journal's sessions are found again."""
        batch = super()._fetch_one_gen_batch()
        if self.seamless.gateway.enabled:
            tu.assign_non_tensor_stack(batch, "uid", self.names.take(data_rows(batch)))
        return batch

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        """Generation begins when the version of the step before is committed, and would else begin on an older one.

        A manager of the user's begins at once, so that the commit is waited for.
        """
        if not isinstance(self.agent_loop_manager, SeamlessAgentLoopManager):
            self.commit.wait(Reach.COMMITTED)
        self.lengths.begin(batch["uid"])
        return int(super()._submit_batch_to_rollout(batch))

    def on_sample_begin(self) -> None:
        self.enter_stage(f"waiting for groups, step {self.global_steps}")
        self._mini_batch_ended()
        self.groups.begin()
        self.feed.refill_for_update()
        self._ask_engine()
        if self.replay_buffer.finished() < self.feed.bound.batch:
            self.lending.offer(None)

    def _await_groups(self) -> None:
        self.groups.wait(first=not self._ask_engine())

    def _ask_engine(self) -> bool:
        """Has an engine read a sample of the next update by the weights that it begins with; False: none has ended."""
        if self.mismatch is None or not isinstance(self.agent_loop_manager, SeamlessAgentLoopManager):
            return True
        return self.mismatch.ask(self.commit.begun)

    def on_sample_end(self) -> None:
        self.enter_stage(f"computing, step {self.global_steps}")
        self.groups.end()
        self.feed.mini_batch_taken()
        self.feed.defer_rest()
        if self.curr_step_profile:
            self._stop_rollout_profiling()

    def _before_computation(self) -> None:
        """Training is about to take its devices: they might else be lent for what is being ended, or load."""
        self.feed.await_deferred()
        self.commit.wait(Reach.LOADED, self.lending.ids)

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *options: Any, **more: Any) -> Any:
        """verl's order of the rows, among ranks; where workers compute shared prefixes once, prompts kept together."""
        batch = super()._balance_batch(batch, metrics, *options, **more)
        if self.shared_prefixes is not None:
            ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
            self.shared_prefixes.arrange(batch, ranks, self._mini_batches(len(batch)))
        return batch

    def _mini_batches(self, rows: int) -> int:
        """Parts of so many rows of which each consecutive mini-batch, the actor's or the critic's, has whole ones."""
        of_actor = self.config.actor_rollout_ref.actor
        trained = [] if self.global_steps < self.config.trainer.critic_warmup else [of_actor]
        trained += [self.config.critic] if self.use_critic else []
        return math.lcm(*(self._steps_of(one, rows) for one in trained if not one.shuffle))

    def _steps_of(self, trained: Any, rows: int) -> int:
        """An update's optimizer steps."""
        if self.weighs_sessions:
            return optimizer_steps(trained, self.feed.bound.batch)
        return max(1, rows // (int(trained.ppo_mini_batch_size) * int(self.config.actor_rollout_ref.rollout.n)))

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        if not self.weighs_sessions:
            return int(super()._get_required_batch_multiple(dp_size))
        return rows_multiple(self.config, self.feed.bound.batch, dp_size, critic=self.use_critic)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.seamless.tokens.policy != "train_all":
            trained, masked = mask_stale(batch, self.token_policy, self.global_steps - 1)
            self.counted["seamless/tokens/trained"] += trained
            self._count_masked(masked)
            self.trains = trained > 0
            if not self.trains:
                level = self.feed.ahead.level
                fewer = f", or set seamless.ahead={level - 1}" if level else ""
                logger.warning(ALL_MASKED, self.seamless.tokens.policy, fewer)
        bypass = self.config.algorithm.rollout_correction.bypass_mode  # with it, both logprobs are the same numbers
        if not bypass:
            batch = super()._compute_old_log_prob(batch, metrics)
            self._add_agreement(metrics, agreement(batch))
        elif lacking := [i for i, tag in enumerate(batch.tags) if not has_old_logprobs(tag)]:
            super()._compute_old_log_prob(rows_at(batch, lacking), metrics)  # reads one column and writes the other
        return batch

    def _add_agreement(self, metrics: dict[str, Any], found: Mapping[str, float]) -> None:
        metrics.update(found)
        self.counted.update({name: int(found[name]) for name in found if name in COUNTS_OF_AGREEMENT})

    def _count_masked(self, tokens: int, reason: DropReason = DropReason.STALE) -> None:
        self.counted[f"seamless/tokens/masked_as_{reason}"] += tokens
        ray.get(self.data_plane.actor.count_masked.remote(tokens, reason))

    def _compute_values(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self.lending.training("infer_batch"):  # the critic's group returns at once, verl waits in here
            return super()._compute_values(batch, metrics)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        return self.advantages.compute(batch, metrics, super()._compute_advantage, trains=self.trains)

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        of_critic: dict[str, Any] = {}
        with self.lending.training("train_mini_batch"), self._update(batch, "critic_wg", "train_mini_batch"):
            batch = super()._update_critic(batch, of_critic)
        metrics.update(share_of_update(of_critic, CRITIC))
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.extra_info[UPDATE] = update_numbers(
            self.seamless.correction,
            self.global_steps,
            self.local_trigger_step,
            self.parameter_sync_step,
            measures=self.config.algorithm.rollout_correction.bypass_mode,
        )
        of_actor: dict[str, Any] = {}
        first = self.mismatch is not None and self.local_trigger_step == 0
        compared = batch.extra_info[COMPARED] = self._compared_row(batch) if first else ""
        with self._update(batch, "actor_rollout_wg", "update_actor"):
            batch = super()._update_actor(batch, of_actor)
        self._add_agreement(metrics, of_update(share_of_update(of_actor, ACTOR)))
        if compared:
            self.mismatch.end_update(self.actor_rollout_wg.compared_logprobs())
            metrics.update(self.mismatch.judge())
        return batch

    def _compared_row(self, batch: Any) -> str:
        """The key of the row that an engine reads, too, or ""; it is of the first mini-batch of the first rank."""
        first = max(1, len(batch) // (self.actor_rollout_wg.world_size * self._mini_batches(len(batch))))
        batch = rows_at(batch, range(first))
        own = set(own_keys(batch))
        rows = {key: tag for key, tag in zip(batch.keys, batch.tags, strict=True) if key in own}
        return self.mismatch.begin_update(self.commit.begun, rows)

    def _update(self, batch: Any, group: str, method: str) -> AbstractContextManager[None]:
        """In the block, workers get the columns that an update reads and the keys of its rows; where a session weighs
        once, there are as many mini-batches as it had whole."""
        batch.fields, batch.extra_info[KEYS] = trained_columns(batch.fields), "\n".join(batch.keys)
        if not self.weighs_sessions:
            return nullcontext()
        config = self.config.critic if group == "critic_wg" else self.config.actor_rollout_ref.actor
        rows = len(batch) // optimizer_steps(config, self.feed.bound.batch)
        return mini_batches_of(getattr(self, group), method, rows)

    # A step's end: a checkpoint where one is due, the commit of the weights, and the next step's prompts

    def _save_checkpoint(self) -> None:
        self.enter_stage(f"saving, step {self.global_steps}")
        self.commit.wait()
        self.checkpoints.refuse_not_finite(f"The model after step {self.global_steps}", KEEP_EARLIER)
        self._record_groups()  # before the checkpoint has their effect: a later start trusts what is recorded up to it
        with self.checkpoints.saving(self.global_steps, self._saved_parts()):
            self._log_what_is_known()
            super()._save_checkpoint()

    def _saved_parts(self) -> dict[str, Saved]:
        """The parts whose state is in each checkpoint, by their files."""
        scheduling = SchedulingState(self.lending, self.feed.ahead.chosen, self.feed.tail)
        sampler = {} if self.sampled is None else {SAMPLER: self.sampled.sampling}
        return {SCHEDULING: scheduling, PROMPTS: self.names, **sampler}

    def _log_what_is_known(self) -> None:
        """A line of the step in the file of metrics, before its checkpoint is whole: a run resumed there has none."""
        batch, metrics = self.step_result
        data = tq.kv_batch_get(keys=own_keys(batch), partition_id=batch.partition_id, select_fields=["rm_scores"])
        reward = fmean(float(scores.sum()) for scores in data["rm_scores"].unbind())
        self.step_metrics.add(self.global_steps, {**metrics, REWARD: reward})

    def on_step_end(self) -> None:
        self.enter_stage(f"committing version {self.global_steps}")
        self._mini_batch_ended()
        self.feed.step_ended()
        self._record_groups()
        compared = {} if self.mismatch is None else self.mismatch.judge()  # before its weights are staged over
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self.lending.before_commit()
            self.starter.before_commit()
            metrics = self.commit.begin(self.global_steps)
            self.lending.on_committed()
        self.failure_shares.step_ended(metrics)
        self._ask_engine()
        metrics |= compared
        metrics |= self.feed.tail.metrics() if self.feed.tail.extra else {}
        metrics |= self.replay_buffer.carried_over(self.global_steps)
        if self.validation is not None and self.global_steps < self.total_training_steps:  # then another one's follow
            metrics |= self.validation.take()
        metrics |= {} if self.sampled is None else self.sampled.sampling.metrics()
        self._begin_next_step()
        metrics |= self.device_time.close(f"step {self.global_steps}")
        metrics |= self.feed.ahead.step_ended(self.device_time.idle_share(self.generating))
        self._pending_sync_metrics = metrics | self.lending.metrics() | self.starter.metrics() | self.watch_metrics()

    def _mini_batch_ended(self) -> None:
        """The mini-batch that was taken last, if any, is trained."""
        self.feed.mini_batch_ended()
        self.lending.statistics.mini_batch_ended()

    def _record_groups(self) -> None:
        """What became of groups since the last call, into the journal, and their lengths into their file."""
        self.feed.await_deferred()  # a step that computes nothing, before an actor's warm-up has ended, did not
        details = {"policy": self.seamless.tokens.policy, "version": self.global_steps - 1}
        groups = self.replay_buffer.take_decided(self.global_steps, details, self.group_details)
        self.group_details.clear()
        self.data_plane.record_groups(groups if self.seamless.gateway.enabled else [])
        trained = [group.uid for group in groups if group.outcome is GroupOutcome.TRAINED]
        kept = (GroupOutcome.TRAINED, GroupOutcome.DEFERRED)  # a deferred prompt begins again
        dropped = [group.uid for group in groups if group.outcome not in kept]
        self.lengths.write(self.global_steps, trained, dropped)

    def _begin_next_step(self) -> None:
        """Submits the next step's prompts, if it follows at once: else engines that have ended what was drawn ahead
        would stand idle while metrics are taken and rows cleared."""
        if self._goes_on_at_once():
            self.global_steps += 1  # prompts that are submitted now are the next step's
            try:
                self.feed.prepare_early()
            finally:
                self.global_steps -= 1

    def _goes_on_at_once(self) -> bool:
        """Whether no validation, profile or end of the run is between; a manager of the user's may generate before it
        returns."""
        if not isinstance(self.agent_loop_manager, SeamlessAgentLoopManager):
            return False
        trainer, step = self.config.trainer, self.global_steps
        ends = step >= self.total_training_steps or step // self.steps_per_epoch >= trainer.total_epochs
        validates = trainer.test_freq > 0 and step % trainer.test_freq == 0 and self.validation is None
        profiles = self.config.global_profiler.steps is not None
        return not (ends or validates or profiles or self.config.skip.rollout_tq.enable)

    def on_train_end(self) -> None:
        """Where epochs end before the steps do."""
        super().on_train_end()
        if self.validation is not None and (metrics := self.validation.end()):
            self.logger.log(data=metrics, step=self.global_steps - 1)

    # What others ask of the run

    @property
    def servers(self) -> SeamlessServers:
        """The replicas' manager, which exists as soon as the workers do."""
        assert self.server_launch.servers is not None, "the workers do not exist yet"
        return self.server_launch.servers

    def _rollout_server_managers(self) -> list[Any]:
        return [self.servers]

    def _get_n_gpus_for_throughput(self) -> int:
        standalone = (placed.replica.world_size for placed in self.servers.placed if not placed.shares_device)
        return int(self.resource_pool_manager.get_n_gpus() + sum(standalone))

    def _training_groups(self) -> dict[str, Any]:
        """The worker groups that train, by role."""
        return {"actor": self.actor_rollout_wg} | ({"critic": self.critic_wg} if self.use_critic else {})

    def watched_actors(self) -> dict[str, Any]:
        """The actors that give a stack report, by name."""
        servers = {placed.replica_id: placed.replica.server_handle for placed in self.servers.placed}
        return {"data plane": self.data_plane.actor, **servers}

    def training_actors(self) -> dict[str, Any]:
        """The workers that compute, by name: the run ends when one of them dies."""
        named = (numbered(f"{role} worker", group.workers) for role, group in self._training_groups().items())
        return {name: actor for workers in named for name, actor in workers.items()}
