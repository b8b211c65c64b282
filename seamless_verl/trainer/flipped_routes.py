"""Counts the routes that the trainer's routers would have chosen otherwise than the engines whose routes they replay.

Those of the update's forward passes, at the positions that are replayed: it is what training would do without R3, from
differences in arithmetic, and from weights that are newer than the engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.utils.device import get_device_name
from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction

from seamless_verl.trainer.finite_updates import UpdateHooks


class FlippedRoutes(UpdateHooks):
    """Adds the share to the metrics of each mini-batch; every rank of an actor that replays with R3 has one.

    Owned state: of the mini-batch, the experts that were replayed and those of them that were not the router's own.
    """

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self.replayed = self.flipped = torch.zeros(())

    def update(self, train_mini_batch: Callable[[Any], Any], data: Any) -> Any:
        return train_mini_batch(data)

    def optimizer_step(self, optimizer_step: Callable[[], Any]) -> Any:
        return optimizer_step()

    def mini_batch(self, train_batch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.replayed = self.flipped = torch.zeros((), device=get_device_name())
        with self._watched():
            output = train_batch(*args, **kwargs)
        counts = torch.stack([self.flipped, self.replayed])
        torch.distributed.all_reduce(counts)  # of ranks with other tokens, and with other layers
        if self.engine.is_mp_src_rank_with_outputs():
            output["metrics"]["routes_flipped"] = [float(counts[0] / counts[1].clamp(min=1))]
        return output

    @contextmanager
    def _watched(self) -> Iterator[None]:
        choose = RouterReplay.get_replay_topk

        def watched(
            router: Any, scores: Any, topk: int, num_groups: Any = None, group_topk: Any = None,
            default_compute_topk: Any = None,
        ) -> Any:  # fmt: skip
            probs, chosen = choose(router, scores, topk, num_groups, group_topk, default_compute_topk)
            if router.router_replay_action == RouterReplayAction.REPLAY_FORWARD and router.target_topk_idx is not None:
                with torch.no_grad():
                    _, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
                    self._count(own, chosen, scores.shape[1], router.target_replay_mask)
            return probs, chosen

        RouterReplay.get_replay_topk = watched
        try:
            yield
        finally:
            RouterReplay.get_replay_topk = choose

    def _count(self, own: torch.Tensor, chosen: torch.Tensor, experts: int, mask: torch.Tensor | None) -> None:
        """`own` and `chosen` [T, top k] are ids of experts; `mask` has the replayed positions, None for all."""
        replayed = torch.zeros(len(own), experts, dtype=torch.bool, device=own.device).scatter(1, chosen, True)
        flips = own.shape[1] - replayed.gather(1, own).sum(1)
        rows = torch.ones_like(flips) if mask is None else mask.to(flips).flatten()
        self.flipped, self.replayed = self.flipped + (flips * rows).sum(), self.replayed + rows.sum() * own.shape[1]
