"""Computes advantages: by verl's estimators or this package's, of a batch, or of groups before they are in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from omegaconf import DictConfig
from verl.trainer.ppo.v1 import trainer_base

from seamless_verl.agent_loops.given_prompts import TRAIN
from seamless_verl.agent_loops.rows import prompt_of
from seamless_verl.config.checks.estimators import OF_TURNS, OWN_ESTIMATORS
from seamless_verl.platform.adaptation import rebound
from seamless_verl.trainer.advantages import advantages_of
from seamless_verl.trainer.group_advantages import (
    GroupAdvantages,
    follow_from_groups,
    rows_at,
    with_all_columns,
)
from seamless_verl.trainer.own_estimators import OwnEstimate, read_turns
from seamless_verl.trainer.session_weight import advantage_by_session, put_row_weights
from seamless_verl.trainer.setup import TrainerSetup
from seamless_verl.trainer.token_mask import mask_rows
from seamless_verl.trajectory.account import DropReason

TRAIN_ALL = "train_all"


class AdvantageTrainer(TrainerSetup):
    """verl's trainer with our parts, and with advantages that are computed while an update runs, where they can be."""

    def __init__(self, config: DictConfig) -> None:
        super().__init__(config)
        self.group_advantages = GroupAdvantages()
        all_trained = self.seamless.tokens.policy == TRAIN_ALL  # else masks are decided when a batch is taken
        self.advantages_follow_from_groups = all_trained and follow_from_groups(config)

    def _compute_advantages_ahead(self) -> None:
        """Of the groups that are trained next, where they do not depend on the batch that they will be in."""
        scored = self.reward_loop_manager.reward_loop_worker_handles is not None  # as rows are written
        if not scored or not self.advantages_follow_from_groups:
            return
        self.group_advantages.keep_only(self.replay_buffer.prompt_global_steps[TRAIN].keys())
        ended = self.replay_buffer.ended_groups(self.bound.batch, self.group_advantages.__contains__)
        if ended.keys:
            self._verl_advantage(ended, {})
            self.group_advantages.add(ended, advantages_of(ended) if self.seamless.gateway.enabled else {})

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.config.algorithm.adv_estimator in OWN_ESTIMATORS:
            batch = self._own_advantage(batch, metrics)
            self._describe_advantages(batch)
        elif len(lacking := self.group_advantages.lacking(batch)) < len(batch):
            batch = self._complete_advantages(batch, lacking, metrics)
        else:
            batch = self._verl_advantage(batch, metrics)
            self._describe_advantages(batch)
        return put_row_weights(batch) if self.weighs_sessions else batch

    def _complete_advantages(self, batch: Any, lacking: Sequence[int], metrics: dict[str, Any]) -> Any:
        """Those of a batch whose other groups have them."""
        for uid, advantages in self.group_advantages.take({prompt_of(key) for key in batch.keys}).items():
            self.group_details[uid]["advantages"] = advantages
        if lacking:
            rows = self._verl_advantage(rows_at(batch, lacking), metrics)
            self._describe_advantages(rows)  # also of groups that have other rows by now
        return with_all_columns(batch)

    def _verl_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if not self.weighs_sessions:
            return super()._compute_advantage(batch, metrics)
        with rebound(trainer_base, compute_advantage_for_multi_trajectories=advantage_by_session):
            return super()._compute_advantage(batch, metrics)

    def _describe_advantages(self, batch: Any) -> None:
        """For the journal."""
        if self.seamless.gateway.enabled:
            for uid, advantages in advantages_of(batch).items():
                self.group_details[uid]["advantages"] = advantages

    def _own_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """By an estimator of this package; masks the rows that it leaves out of training."""
        turns = read_turns(batch) if self.config.algorithm.adv_estimator in OF_TURNS else None
        estimate = OwnEstimate(turns, self.seamless.turns)
        with rebound(trainer_base, compute_advantage_for_multi_trajectories=estimate):
            batch = super()._compute_advantage(batch, metrics)
        metrics.update(estimate.metrics)
        if estimate.untrained:
            masked = mask_rows(batch, estimate.untrained)
            for uid, session, _ in (key.rsplit("_", 2) for key in estimate.untrained):
                self.group_details[uid]["pivot"] = session
            metrics["seamless/tokens/masked_as_pivot"] = masked
            ray.get(self.data_plane.actor.count_masked.remote(masked, DropReason.PIVOT))
        return batch
