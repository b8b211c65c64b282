"""The `seamless` trainer: one asynchronous PPO trainer for every layout.

It extends verl's PPOTrainer, which needs no standalone pool, so that colocated, disaggregated and multiplexed layouts
differ in data and not in class. Owned state: the weight version, which is verl's `global_steps` at the last commit,
and the validation curve.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils.debug import marked_timer

from seamless_verl.agent_loops.rows import has_old_logprobs
from seamless_verl.journal import GroupOutcome
from seamless_verl.runtime.checkpoint_cleanup import marked_save, remove_emptied
from seamless_verl.runtime.checkpoint_marker import RESUME_ANOTHER, step_folder
from seamless_verl.runtime.process import freeze_imports
from seamless_verl.runtime.scores import by_score, metric_values
from seamless_verl.trainer.advantage_trainer import TRAIN_ALL, AdvantageTrainer
from seamless_verl.trainer.corrected_update import UPDATE, update_numbers
from seamless_verl.trainer.deferred_prompts import stored
from seamless_verl.trainer.earlier_checkpoints import all_steps, earlier_steps, kept_checkpoints, loaded_from
from seamless_verl.trainer.finite_updates import KEYS
from seamless_verl.trainer.replica_starts import LOOK_S
from seamless_verl.trainer.run_waits import PROGRESS_REPLY_S
from seamless_verl.trainer.scheduling_checkpoint import (
    checkpoint_of,
    load_sampling,
    load_scheduling,
    save_sampling,
    save_scheduling,
)
from seamless_verl.trainer.session_weight import fixed_micro_batches, mini_batches_of
from seamless_verl.trainer.step_line import REWARD
from seamless_verl.trainer.step_log import logging_of
from seamless_verl.trainer.token_mask import agreement, mask_stale, own_keys
from seamless_verl.trainer.trained_columns import trained_columns

KEEP_EARLIER = "It is not saved, so that the last checkpoint stays: the same command goes on from that"


@register_trainer("seamless")
class SeamlessTrainer(AdvantageTrainer):
    """PPO with generation and training overlapped as far as `seamless.max_staleness` allows."""

    def on_init_end(self) -> None:
        if self.global_steps:
            checkpoint = checkpoint_of(self.config, self.global_steps)
            self.tail.drew(self.global_steps * int(self.config.data.train_batch_size))  # where the file lacks it
            load_scheduling(checkpoint, self.lending, self.ahead, self.tail)
            self.tail.keep(stored())
            if self.prompt_sampling is not None:
                load_sampling(checkpoint, self.prompt_sampling)
        if self.seamless.gateway.enabled:
            self.data_plane.begin_run(self.names.run, self.global_steps)
        self.commit(self.global_steps)  # of the checkpoint just loaded, or of the initial model
        self.commit.wait()
        self.starter.begin()

    def fit(self, agent_loop_manager: Any) -> None:
        lines = self.seamless.console == "line"
        logging = logging_of(self.step_metrics, lambda: int(self.total_training_steps), lines=lines)
        with logging:
            super().fit(agent_loop_manager)

    looked_for_returns = 0.0  # when, for replicas that were given up and reply again
    returns: ray.ObjectRef[list[str]] | None = None  # the question for them that has no reply yet

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps:
            self._refuse_not_finite(f"Checkpoint {checkpoint_of(self.config, self.global_steps)}", RESUME_ANOTHER)
        self.curve.truncate_after(self.global_steps)
        self.step_metrics.resume_at(self.global_steps)
        folder = Path(os.path.abspath(self.config.trainer.default_local_dir))
        if self.global_steps and loaded_from(self.config) == folder:
            self._adopt_checkpoints(folder)

    def _adopt_checkpoints(self, folder: Path) -> None:
        """What earlier starts saved in this run's folder is rotated like what this one saves.

        One that was killed while it rotated may have left a folder without its actor.
        """
        self.saved = earlier_steps(folder, self.global_steps)
        if kept_checkpoints(self.config)[0] is not None and self.global_steps in self.saved:
            remove_emptied(folder, all_steps(folder, self.global_steps))
        paths = [step_folder(folder, step) for step in self.saved]
        self.actor_rollout_wg.adopt_checkpoints([str(path / "actor") for path in paths])
        if self.use_critic:
            self.critic_wg.adopt_checkpoints([str(path / str(Role.Critic)) for path in paths])

    def _refuse_not_finite(self, what: str, way_out: str) -> None:
        """Raises NotFiniteError if a weight of actor or critic is not a finite number."""
        self.actor_rollout_wg.refuse_not_finite(f"{what} of the actor", way_out)
        if self.use_critic:
            self.critic_wg.refuse_not_finite(f"{what} of the critic", way_out)

    def _save_checkpoint(self) -> None:
        self.enter_stage(f"saving, step {self.global_steps}")
        self.commit.wait()
        self._refuse_not_finite(f"The model after step {self.global_steps}", KEEP_EARLIER)
        self._record_groups()  # before the checkpoint has their effect: a later start trusts what is recorded up to it
        with marked_save(self.config.trainer.default_local_dir, self.global_steps):
            self._save_own_state(checkpoint_of(self.config, self.global_steps))
            self._log_what_is_known()
            super()._save_checkpoint()  # which says at its end that the checkpoint is whole
        self._prune_checkpoints()
        folder = Path(self.config.trainer.default_local_dir)
        if (folder / f"global_step_{self.global_steps}" / "actor").is_dir():  # else on another machine, or not yet
            self.saved = remove_emptied(folder, [*self.saved, self.global_steps])

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        self.step_result = super().step(metrics, timing_raw), metrics
        return self.step_result[0]

    def _log_what_is_known(self) -> None:
        """A line of the step in the file of metrics, before its checkpoint is whole; verl logs it when all is known.

        A run that is killed in between resumes after this step, which would have none.
        """
        batch, metrics = self.step_result
        data = tq.kv_batch_get(keys=own_keys(batch), partition_id=batch.partition_id, select_fields=["rm_scores"])
        reward = fmean(float(scores.sum()) for scores in data["rm_scores"].unbind())
        self.step_metrics.add(self.global_steps, {**metrics, REWARD: reward})

    def _prune_checkpoints(self) -> None:
        """Removes what is beyond the bounds, now that the tracker names a checkpoint that stays."""
        actor, critic = kept_checkpoints(self.config)
        if actor is not None:
            self.actor_rollout_wg.prune_checkpoints(actor)
        if self.use_critic and critic is not None:
            self.critic_wg.prune_checkpoints(critic)

    def _save_own_state(self, checkpoint: Path) -> None:
        checkpoint.mkdir(parents=True, exist_ok=True)
        save_scheduling(checkpoint, self.lending, self.ahead, self.tail)
        self.names.save(checkpoint)
        if self.prompt_sampling is not None:
            save_sampling(checkpoint, self.prompt_sampling)

    def on_train_begin(self) -> None:
        self.prompt_scan.result()
        freeze_imports()
        self.device_time.begin()
        self.step_began = time.monotonic()
        self._add_async_warmup_batches(self.batches_ahead)

    def on_sample_begin(self) -> None:
        self.enter_stage(f"waiting for groups, step {self.global_steps}")
        self.mini_batch_ended()
        self.sample_began()
        self.refill_for_update()
        if self.replay_buffer.finished() < self.bound.batch:
            self.lending.offer(None)

    def _wait_for_groups(self) -> None:
        self.starter.while_waiting(self._load_started)
        if time.monotonic() - self.looked_for_returns >= LOOK_S:
            self.looked_for_returns = time.monotonic()
            if names := self._taken_back():
                self._load_started(names)
        super()._wait_for_groups()

    def _taken_back(self) -> list[str]:
        """Replicas that reply again, as of the last question that has a reply: a data plane may take long for one."""
        if self.returns is None:
            self.returns = self.data_plane.actor.taken_back.remote()
        if not ray.wait([self.returns], timeout=PROGRESS_REPLY_S)[0]:
            return []
        reply, self.returns = self.returns, None
        return list(ray.get(reply))

    def looks_often(self) -> bool:
        return super().looks_often() or self.starter.starting

    def _load_started(self, ids: Sequence[str]) -> None:
        self.commit.load_started(ids)
        self.lending.on_started(ids)

    def on_sample_end(self) -> None:
        self.enter_stage(f"computing, step {self.global_steps}")
        self.sample_ended()
        self.count_mini_batch()
        self.defer_rest()
        if self.curr_step_profile:
            self._stop_rollout_profiling()

    def on_step_end(self) -> None:
        self.enter_stage(f"committing version {self.global_steps}")
        self.step_ended()
        self._record_groups()
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self.lending.before_commit()
            self.starter.before_commit()
            self._pending_sync_metrics = self.commit(self.global_steps)
            self.lending.on_committed()
        self._pending_sync_metrics |= self.tail.metrics() if self.tail.extra else {}
        self._pending_sync_metrics |= self.replay_buffer.carried_over(self.global_steps)
        self._pending_sync_metrics |= {} if self.prompt_sampling is None else self.prompt_sampling.metrics()
        self.begin_next_step()
        used = self.device_time.close(f"step {self.global_steps}")
        self._pending_sync_metrics |= used | self.choose_ahead(self.device_time.idle_share(self.generating))
        self._pending_sync_metrics |= self.lending.metrics() | self.starter.metrics()
        self._pending_sync_metrics |= self.watch_metrics()

    def _record_groups(self) -> None:
        """What became of groups since the last call, into the journal, and their lengths where they are recorded."""
        self.await_deferred()  # a step that computes nothing, before an actor's warm-up has ended, did not
        details = {"policy": self.seamless.tokens.policy, "version": self.global_steps - 1}
        groups = self.replay_buffer.take_decided(self.global_steps, details, self.group_details)
        self.group_details.clear()
        self.data_plane.record_groups(groups if self.seamless.gateway.enabled else [])
        if self.lengths is not None:
            trained = [group.uid for group in groups if group.outcome is GroupOutcome.TRAINED]
            kept = (GroupOutcome.TRAINED, GroupOutcome.DEFERRED)  # a deferred prompt begins again
            dropped = [group.uid for group in groups if group.outcome not in kept]
            self.lengths.write(self.global_steps, trained, dropped)

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.seamless.tokens.policy != TRAIN_ALL:
            trained, masked = mask_stale(batch, self.token_policy, self.global_steps - 1)
            metrics.update({"seamless/tokens/trained": trained, "seamless/tokens/masked_as_stale": masked})
            ray.get(self.data_plane.actor.count_masked.remote(masked))
        bypass = self.config.algorithm.rollout_correction.bypass_mode  # with it, both logprobs are the same numbers
        if not bypass:
            batch = super()._compute_old_log_prob(batch, metrics)
            metrics.update(agreement(batch))
        elif lacking := [i for i, tag in enumerate(batch.tags) if not has_old_logprobs(tag)]:
            super()._compute_old_log_prob(rows_at(batch, lacking), metrics)  # reads one column and writes the other
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Rows of a batch are padded to a multiple of this; each mini-batch has as many, and each rank of each."""
        if not self.weighs_sessions:
            return int(super()._get_required_batch_multiple(dp_size))
        steps = [self._steps(self.config.actor_rollout_ref.actor)]
        steps += [self._steps(self.config.critic)] if self.use_critic else []
        return int(dp_size * math.lcm(*steps) * math.lcm(*fixed_micro_batches(self.config)))

    def _steps(self, config: Any) -> int:
        """Optimizer steps of an update: its prompts in mini-batches of so many prompts."""
        return max(1, self.bound.batch // int(config.ppo_mini_batch_size))

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        correction, update = self.seamless.correction, self.step_batches - 1
        batch.fields, batch.extra_info[KEYS] = trained_columns(batch.fields), "\n".join(batch.keys)
        batch.extra_info[UPDATE] = update_numbers(correction, self.global_steps, update, self.parameter_sync_step)
        if not self.weighs_sessions:
            return super()._update_actor(batch, metrics)
        rows = len(batch) // self._steps(self.config.actor_rollout_ref.actor)
        with mini_batches_of(self.actor_rollout_wg, "update_actor", rows):
            return super()._update_actor(batch, metrics)

    def _compute_values(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self.lending.training("infer_batch"):  # the critic's group returns at once, verl waits in here
            return super()._compute_values(batch, metrics)

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch.fields, batch.extra_info[KEYS] = trained_columns(batch.fields), "\n".join(batch.keys)
        with self.lending.training("train_mini_batch"):
            if not self.weighs_sessions:
                return super()._update_critic(batch, metrics)
            with mini_batches_of(self.critic_wg, "train_mini_batch", len(batch) // self._steps(self.config.critic)):
                return super()._update_critic(batch, metrics)

    def _validate(self) -> dict[str, float]:
        self.enter_stage(f"validating, step {self.global_steps}")
        self.commit.wait()
        self.lending.offer(None)
        metrics: dict[str, float] = super()._validate()
        self.enter_stage(f"validated, step {self.global_steps}")
        self.curve.add(self.global_steps, metrics)
        return metrics

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
        scored, unscored = by_score(reward_extra_infos_dict.get("reward", []))
        sources, uids, turns = ([column[i] for i in scored] for column in (data_sources, sample_uids, sample_turns))
        infos = {
            name: metric_values([values[i] for i in scored], texts=name == "pred")
            for name, values in reward_extra_infos_dict.items()
        }
        left_out = Counter((str(data_sources[i]), str(sample_uids[i])) for i in unscored)
        expected = {key: count - left_out[key] for key, count in (expected_acc_counts or {}).items()}
        metrics: dict[str, float] = super()._val_metrics_update(sources, uids, infos, turns, expected)
        return metrics | {"seamless/validation/unscored": float(len(unscored))}


def rows_at(batch: KVBatchMeta, places: Sequence[int]) -> KVBatchMeta:
    """These rows of a batch."""
    keys, tags = [batch.keys[i] for i in places], [batch.tags[i] for i in places]
    return KVBatchMeta(keys=keys, tags=tags, partition_id=batch.partition_id)
