"""verl's replay buffers with a shorter poll, given to verl through `trainer.v1.sampler.custom_sampler`.

Nothing else is changed, which separates what a mode owes to its poll of 2.0 s from what it owes to its design. verl
leaves filtering to a custom sampler and tells it nothing of `algorithm.filter_groups`; these are verl's own buffers, so
that they ask the trainer, whose method `refill_fn` is, for what verl would have given them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from seamless_verl.tools.compare.arms import SAMPLER, SHORT_POLL_S
from seamless_verl.tools.compare.budget import select


class PollingReplayBuffer(ReplayBuffer):  # type: ignore[misc]
    """For `sync`."""

    def __init__(self, *, refill_fn: Callable[..., Any], **kwargs: Any) -> None:
        kwargs |= filtering_of(refill_fn, sync=True)
        super().__init__(poll_interval=SHORT_POLL_S, refill_fn=refill_fn, **kwargs)


class PollingReplayBufferAsync(ReplayBufferAsync):  # type: ignore[misc]
    """For the asynchronous modes; lending asks it for `wait_for_sampleable` and `get_sampleable_count`, verl's own."""

    def __init__(self, *, refill_fn: Callable[..., Any], **kwargs: Any) -> None:
        kwargs |= filtering_of(refill_fn, sync=False)
        super().__init__(poll_interval=SHORT_POLL_S, refill_fn=refill_fn, **kwargs)


def filtering_of(refill_fn: Callable[..., Any], *, sync: bool) -> dict[str, Any]:
    """How groups are filtered, as verl's trainer tells its own buffers and no custom one.

    `refill_fn` is a method of that trainer; `PPOTrainer._build_replay_buffer` is what this repeats.
    """
    trainer: Any = refill_fn.__self__  # type: ignore[attr-defined]
    config, metric = trainer.config, trainer._resolve_filter_groups_metric()  # DAPO's, None where it does not filter
    refills = bool(select(config, f"{SAMPLER}.sync_refill_failed_groups"))
    found = {"filter_groups_metric": metric, "sync_refill_failed_groups": refills}
    if not sync:
        return found
    batch = select(config, "data.train_batch_size")
    fetched = 1 if metric is not None or refills else select(config, "data.gen_batch_size") or batch
    inflight = select(config, "algorithm.filter_groups.max_inflight_gen_batches") if metric is not None else None
    more = {"train_batch_size": batch, "gen_batch_size": fetched}
    return found | more | {"max_inflight_gen_batches": 1 if inflight is None else inflight}
