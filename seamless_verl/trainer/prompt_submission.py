"""Submits prompts for generation as far as the staleness bound has room, and waits for finished groups.

Owned state: how many mini-batches training has taken, of this step and of all. With the prompts outstanding,
which the buffer counts, and the staleness bound they say how many more there is room for.
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

POLL_S = 10.0  # nothing depends on it: agent loops notify us


class PromptSubmittingTrainer(PPOTrainer):  # type: ignore[misc]
    """verl's trainer with our buffer, given prompts before each update as far as the staleness bound has room."""

    seamless: SeamlessConfig
    data_plane: DataPlaneClient
    lending: DeviceLending

    def __init__(self, config: DictConfig) -> None:
        self.taken = self.trained = 0  # mini-batches, of this step and of all
        self.groups_seen = 0  # groups that had finished when we last looked
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
        """Return when a group has ended since the last time, or after a while in which none has."""
        self.lending.offer(None)  # devices that were not lent at an earlier look may be now
        self.groups_seen = ray.get(self.data_plane.actor.wait_for_groups.remote(self.groups_seen, self.poll_s))

    def prepare_step(self) -> dict[str, Any]:
        """Submit one batch, or what the bound has room for."""
        if self.room() < self.config.data.train_batch_size:
            self.refill()
            return {}
        return dict(super().prepare_step())

    def room(self) -> int:
        """Prompts that may be submitted now."""
        return self.bound.room(self.replay_buffer.outstanding(), self.seamless.batches_ahead, self.taken)

    def refill(self, at_most: int | None = None) -> None:
        """Submit what there is room for, so that engines do not run low until the step ends."""
        room = self.room() if at_most is None else min(self.room(), at_most)
        if room:
            self._add_prompts_to_generate(room)

    def refill_for_update(self) -> None:
        """Before an update: the first one's prompts were submitted with the step."""
        if self.taken and not self.config.skip.rollout_tq.enable:  # where what was generated once is read again
            self.refill()

    def mini_batch_taken(self) -> None:
        self.taken, self.trained = self.taken + 1, self.trained + 1

    def step_ended(self) -> None:
        self.taken = 0

    def progress(self) -> TrainingProgress:
        """Where training is, and what it waits for, as of the last look at the queue."""
        needed = self.bound.batch
        left = needed * (self.parameter_sync_step - self.taken)
        demand = Demand(ready=self.replay_buffer.finished(), needed=needed, left_in_step=left)
        return TrainingProgress(demand, self.trained, self.taken)
