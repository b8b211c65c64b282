"""Computes advantages: by verl's estimators or this package's."""

from __future__ import annotations

from typing import Any

import ray
from verl.trainer.ppo.v1 import trainer_base

from seamless_verl.config.checks.estimators import OF_TURNS, OWN_ESTIMATORS
from seamless_verl.platform.adaptation import rebound
from seamless_verl.trainer.advantages import advantages_of
from seamless_verl.trainer.own_estimators import OwnEstimate, read_turns
from seamless_verl.trainer.session_weight import advantage_by_session, put_row_weights
from seamless_verl.trainer.setup import TrainerSetup
from seamless_verl.trainer.token_mask import mask_rows
from seamless_verl.trajectory.account import DropReason

TRAIN_ALL = "train_all"


class AdvantageTrainer(TrainerSetup):
    """verl's trainer with our parts, and with our estimators beside verl's."""

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.config.algorithm.adv_estimator in OWN_ESTIMATORS:
            batch = self._own_advantage(batch, metrics)
        else:
            batch = self._verl_advantage(batch, metrics)
        self._describe_advantages(batch)
        return put_row_weights(batch) if self.weighs_sessions else batch

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
        estimate = OwnEstimate(turns, self.seamless.turns.depth)
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
