"""verl's replay buffers with a shorter poll, given to verl through `trainer.v1.sampler.custom_sampler`.

Nothing else is changed, which separates what a mode owes to its poll of 2.0 s from what it owes to its design.
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from seamless_verl.compare.polls import SHORT_POLL_S


class PollingReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    """For `sync`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(poll_interval=SHORT_POLL_S, **kwargs)


class PollingReplayBufferAsync(ReplayBufferAsync):  # type: ignore[misc]
    """For the asynchronous modes; lending asks it for `wait_for_sampleable` and `get_sampleable_count`, verl's own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(poll_interval=SHORT_POLL_S, **kwargs)
