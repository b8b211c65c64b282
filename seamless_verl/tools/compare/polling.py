"""verl's replay buffers with a shorter poll, given to verl through `trainer.v1.sampler.custom_sampler`.

Nothing else is changed, which separates what a mode owes to its poll of 2.0 s from what it owes to its design. verl
leaves filtering to a custom sampler and tells it nothing of `algorithm.filter_groups`; these are verl's own buffers, so
that they ask the trainer, whose method `refill_fn` is, for what verl would have given them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from seamless_verl.tools.compare.arms import SHORT_POLL_S
from seamless_verl.tools.compare.budget import select

SAMPLER = "trainer.v1.sampler"


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
    """The arguments of filtering that verl's trainer, of which this is a method, gives its own buffers."""
    trainer: Any = refill_fn.__self__  # type: ignore[attr-defined]
    return filtering(trainer.config, trainer._resolve_filter_groups_metric(), sync=sync)


def filtering(config: Mapping[str, Any], metric: str | None, *, sync: bool) -> dict[str, Any]:
    """What verl gives its own buffers and no custom one (`PPOTrainer._build_replay_buffer`): how groups are filtered.

    `metric` is the one by which DAPO filters groups, None where it does not.
    """
    refills = bool(select(config, f"{SAMPLER}.sync_refill_failed_groups"))
    found = {"filter_groups_metric": metric, "sync_refill_failed_groups": refills}
    if not sync:
        return found
    batch = select(config, "data.train_batch_size")
    fetched = 1 if metric is not None or refills else select(config, "data.gen_batch_size") or batch
    inflight = select(config, "algorithm.filter_groups.max_inflight_gen_batches") if metric is not None else None
    more = {"train_batch_size": batch, "gen_batch_size": fetched}
    return found | more | {"max_inflight_gen_batches": 1 if inflight is None else inflight}
