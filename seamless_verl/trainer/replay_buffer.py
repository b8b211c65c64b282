"""Which finished groups the trainer takes next, under a bound on their staleness."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBufferAsync

POLL_SECONDS = 0.05  # verl's default of 2.0 s would be most of a small model's step


class SeamlessReplayBuffer(ReplayBufferAsync):
    """verl's asynchronous buffer with the bound of `seamless.max_staleness`.

    A prompt submitted in step p starts on the weights of version p - 1, and step g trains weights
    of version g - 1, so its oldest token is g - p versions old. Batches are taken oldest first, and
    sampling is held while a prompt in flight has reached the bound. That keeps it for 0 and 1; above,
    groups that finish out of order can pass it, because waiting heeds prompts in flight alone.
    """

    def __init__(self, *, max_staleness: int, **kwargs: Any) -> None:
        kwargs.update(max_off_policy_threshold=max_staleness + 1, max_off_policy_strategy="wait")
        super().__init__(poll_interval=POLL_SECONDS, **kwargs)
