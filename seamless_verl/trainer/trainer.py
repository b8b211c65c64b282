"""The `seamless` trainer: one asynchronous PPO trainer for every layout.

It extends verl's PPOTrainer, which needs no standalone pool, so that colocated, disaggregated and multiplexed layouts
differ in data and not in class. Owned state: the weight version, which is verl's `global_steps` at the last commit,
the validation curve, and the count of masked tokens.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils.debug import marked_timer

from seamless_verl.runtime.checkpoint_cleanup import marked_save
from seamless_verl.runtime.process import freeze_imports
from seamless_verl.trainer.setup import TrainerSetup
from seamless_verl.trainer.token_mask import drop_masked, logprob_difference, mask_stale

TRAIN_ALL = "train_all"


@register_trainer("seamless")
class SeamlessTrainer(TrainerSetup):
    """PPO with generation and training overlapped as far as `seamless.max_staleness` allows."""

    masked_tokens = 0  # tokens masked for their age, in the whole run

    def on_init_end(self) -> None:
        self.commit(self.global_steps)  # of the checkpoint just loaded, or of the initial model

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        self.curve.truncate_after(self.global_steps)

    def _save_checkpoint(self) -> None:
        self.enter_stage(f"saving, step {self.global_steps}")
        with marked_save(self.config.trainer.default_local_dir, self.global_steps):
            super()._save_checkpoint()

    def on_train_begin(self) -> None:
        self.prompt_scan.result()
        freeze_imports()
        self.device_time.begin()
        self._add_async_warmup_batches(self.seamless.batches_ahead)

    def on_sample_begin(self) -> None:
        self.enter_stage(f"waiting for groups, step {self.global_steps}")
        self.refill_for_update()
        self.lending.offer(None)

    def on_sample_end(self) -> None:
        self.enter_stage(f"computing, step {self.global_steps}")
        self.count_mini_batch()
        if self.curr_step_profile:
            self._stop_rollout_profiling()

    def on_step_end(self) -> None:
        self.enter_stage(f"committing version {self.global_steps}")
        self.step_ended()
        with marked_timer("update_weights", self.timing_raw, color="red"):
            self.lending.offer(None)  # the next computation is a batch away
            self._pending_sync_metrics = drop_masked(self.commit(self.global_steps), self.masked_tokens)
            self.lending.on_committed()
        self._pending_sync_metrics |= self.device_time.close(f"step {self.global_steps}")
        self._pending_sync_metrics |= self.lending.metrics()

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.seamless.tokens.policy != TRAIN_ALL:
            trained, masked = mask_stale(batch, self.token_policy, self.global_steps - 1)
            metrics.update({"seamless/tokens/trained": trained, "seamless/tokens/masked_as_stale": masked})
            self.masked_tokens += masked
        batch = super()._compute_old_log_prob(batch, metrics)
        if not self.config.algorithm.rollout_correction.bypass_mode:  # with it, both logprobs are the same numbers
            metrics.update(logprob_difference(batch))
        return batch

    def _compute_values(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self.lending.training("infer_batch"):  # the critic's group returns at once, verl waits in here
            return super()._compute_values(batch, metrics)

    def _update_critic(self, batch: Any, metrics: dict[str, Any]) -> Any:
        with self.lending.training("train_mini_batch"):
            return super()._update_critic(batch, metrics)

    def _validate(self) -> dict[str, float]:
        self.enter_stage(f"validating, step {self.global_steps}")
        self.lending.offer(None)
        metrics: dict[str, float] = super()._validate()
        self.enter_stage(f"validated, step {self.global_steps}")
        self.curve.add(self.global_steps, metrics)
        return metrics
