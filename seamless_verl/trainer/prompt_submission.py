"""Submits prompts for generation as far as the staleness bound has room, and waits for finished groups.

Owned state: how many mini-batches training has taken, in this step and in all. How many prompts may be submitted
follows from these, from the outstanding prompts, which the buffer counts, and from the staleness bound.
"""

from __future__ import annotations

from typing import Any

import ray
from omegaconf import DictConfig
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.data_plane.client import DataPlaneClient
from seamless_verl.resources.lending import Demand
from seamless_verl.resources.staleness import StalenessBound
from seamless_verl.trainer.lending import DeviceLending, TrainingProgress
from seamless_verl.trainer.replay_buffer import SeamlessReplayBuffer

POLL_S = 10.0  # only a fallback: agent loops notify the trainer


class PromptSubmittingTrainer(PPOTrainer):  # type: ignore[misc]
    """verl's trainer with our buffer; submits prompts before each update as far as the staleness bound has room."""

    seamless: SeamlessConfig
    data_plane: DataPlaneClient
    lending: DeviceLending

    def __init__(self, config: DictConfig) -> None:
        self.step_batches = self.trained = 0  # mini-batches taken, in this step and in all
        self.groups_seen = 0  # the count of finished groups at the last look
        self.poll_s = POLL_S  # shorter where agent loops do not notify
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
            refill_fn=self.refill,
            filter_groups_metric=self._resolve_filter_groups_metric(),
        )

    def _wait_for_groups(self) -> None:
        """Returns when a group has ended since the last call, or after `poll_s` seconds."""
        self.lending.offer(None)  # the policy may lend now what it did not lend before
        self.groups_seen = ray.get(self.data_plane.actor.wait_for_groups.remote(self.groups_seen, self.poll_s))

    def prepare_step(self) -> dict[str, Any]:
        """Submits one batch, or as much as the bound has room for."""
        if self.room() < self.config.data.train_batch_size:
            self.refill()
            return {}
        return dict(super().prepare_step())

    def room(self) -> int:
        """Prompts that may be submitted now."""
        return self.bound.room(self.replay_buffer.outstanding(), self.seamless.batches_ahead, self.step_batches)

    def refill(self, at_most: int | None = None) -> None:
        """Submits as many prompts as there is room for, so that engines have work until the step ends."""
        room = self.room() if at_most is None else min(self.room(), at_most)
        if room:
            self._add_prompts_to_generate(room)

    def refill_for_update(self) -> None:
        """Submits prompts before an update, except the first, whose prompts were submitted with the step."""
        if self.step_batches and not self.config.skip.rollout_tq.enable:  # with it, stored generations are read again
            self.refill()

    def count_mini_batch(self) -> None:
        self.step_batches, self.trained = self.step_batches + 1, self.trained + 1

    def step_ended(self) -> None:
        self.step_batches = 0

    def progress(self) -> TrainingProgress:
        """How far training is, and what it waits for, as of the last look at the queue."""
        needed = self.bound.batch
        left = needed * (self.parameter_sync_step - self.step_batches)
        demand = Demand(ready=self.replay_buffer.finished(), needed=needed, left_in_step=left)
        return TrainingProgress(demand, self.trained, self.step_batches)
