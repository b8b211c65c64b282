"""Makes the trainer's workers give verl's policy losses what algorithms/loss_call.py says, and scale their learning
rate.

The trainer sends the numbers of an update with its batch, under UPDATE. The worker keeps, while it runs the update:
those numbers, how many optimizer steps are done, and the importance weights of the mini-batch so far.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from verl.utils import tensordict_utils as tu
from verl.workers.utils import losses

from seamless_verl.algorithms import LOSSES
from seamless_verl.algorithms.clipped import log_ratio
from seamless_verl.algorithms.ess_scaling import WeightSums, total, weight_sums
from seamless_verl.algorithms.loss_call import CONTEXT, LossCall, during
from seamless_verl.config.schema import CorrectionConfig
from seamless_verl.platform.adaptation import rebound

UPDATE = "seamless_update"
"""In a batch's `extra_info`: the numbers of `update_numbers`."""


def update_numbers(correction: CorrectionConfig, step: int, update: int, updates: int) -> dict[str, Any]:
    """Of update number `update` (from 0) of `updates` in the trainer's step `step` (from 1)."""
    return {
        "proximal": step - 1 + update / updates,
        "share": 1 / updates,  # of a version
        "scale_lr": correction.scale_lr,
    }


class CorrectedUpdates:
    """Wraps verl's TrainingWorker of an actor and its engine; every rank of the actor has one."""

    def __init__(self, worker: Any) -> None:
        self.engine = worker.engine
        self.numbers: dict[str, Any] | None = None
        self.done, self.steps = 0, 1  # optimizer steps of the update
        self.weights = WeightSums()  # of the mini-batch, as far as this rank has computed its loss
        worker.train_mini_batch = self._beginning(worker.train_mini_batch)
        self.engine.train_batch = self._reporting(self.engine.train_batch)
        self.engine.optimizer_step = self._scaled(self.engine.optimizer_step)

    def _beginning(self, train_mini_batch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The whole update: as many optimizer steps as it has mini-batches, times epochs."""

        @wraps(train_mini_batch)
        def run(data: Any) -> Any:
            self.numbers = tu.get_non_tensor_data(data, UPDATE, None)
            rows = len(data) * self.engine.get_data_parallel_size()
            epochs = tu.get_non_tensor_data(data, "epochs", 1)
            self.done = 0
            self.steps = max(1, rows // tu.get_non_tensor_data(data, "mini_batch_size", rows) * epochs)
            try:
                return train_mini_batch(data)
            finally:
                self.numbers = None

        return run

    def correcting(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """verl's loss function, in which policy losses find their `LossCall`."""

        @wraps(loss)
        def corrected(model_output: Any, data: Any, dp_group: Any = None) -> Any:
            if self.numbers is None or "weight_version" not in data.keys():  # noqa: SIM118 - a TensorDict
                return loss(model_output=model_output, data=data, dp_group=dp_group)
            find = losses.get_policy_loss_fn

            def found(name: str) -> Callable[..., Any]:
                needed = self._scales or name in LOSSES
                return self._given(find(name), data) if needed else find(name)

            with rebound(losses, get_policy_loss_fn=found):
                return loss(model_output=model_output, data=data, dp_group=dp_group)

        return corrected

    def _given(self, policy_loss: Callable[..., Any], data: Any) -> Callable[..., Any]:
        behavior = data["rollout_log_probs"] if "rollout_log_probs" in data.keys() else None  # noqa: SIM118

        @wraps(policy_loss)
        def run(*, old_log_prob: Any, log_prob: Any, response_mask: Any, **arguments: Any) -> Any:
            if self._scales:
                sampled = old_log_prob if behavior is None else padded(behavior, old_log_prob, 0.0)
                self.weights += weight_sums(log_ratio(log_prob.detach(), sampled), response_mask)
            with self._update(data["weight_version"], response_mask):
                return policy_loss(
                    old_log_prob=old_log_prob, log_prob=log_prob, response_mask=response_mask, **arguments
                )

        return run

    def _update(self, versions: Any, mask: torch.Tensor) -> AbstractContextManager[None]:
        assert self.numbers is not None
        proximal = self.numbers["proximal"]
        return during(
            LossCall(
                padded(versions, mask.long(), CONTEXT),
                proximal,
                proximal + self.numbers["share"] * self.done / self.steps,
            )
        )

    @property
    def _scales(self) -> bool:
        return self.numbers is not None and bool(self.numbers["scale_lr"])

    def _scaled(self, optimizer_step: Callable[[], Any]) -> Callable[[], Any]:
        """One optimizer step, at the learning rate that the mini-batch's effective sample size allows."""

        @wraps(optimizer_step)
        def run() -> Any:
            self.done += 1
            if not self._scales:
                return optimizer_step()
            self.weights = of_all_ranks(self.weights, self.engine.get_data_parallel_rank())
            groups = self.engine.optimizer.param_groups
            rates = [group["lr"] for group in groups]
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * self.weights.lr_scale
            try:
                return optimizer_step()
            finally:
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate

        return run

    def _reporting(self, train_batch: Callable[..., Any]) -> Callable[..., Any]:
        """One mini-batch; adds its effective sample size to the metrics."""

        @wraps(train_batch)
        def run(*arguments: Any, **named: Any) -> Any:
            self.weights = WeightSums()
            output = train_batch(*arguments, **named)
            if self._scales and self.engine.is_mp_src_rank_with_outputs():
                output["metrics"]["ess_ratio"] = [self.weights.ess_ratio]
                output["metrics"]["lr_scale"] = [self.weights.lr_scale]
            return output

        return run


def padded(column: Any, like: torch.Tensor, empty: float) -> torch.Tensor:
    """A column of responses, nested or [rows, any], as `like` is: [rows, response], of its dtype, on its device.

    Where a row has no value, it is `empty`. verl's padding rows have the columns of other rows, of other lengths; their
    masks are 0.
    """
    rows = column.unbind() if column.is_nested else column
    full = torch.full_like(like, empty)
    for target, row in zip(full, rows, strict=True):
        length = min(len(row), len(target))
        target[:length] = row[:length]
    return full


def of_all_ranks(weights: WeightSums, dp_rank: int) -> WeightSums:
    """The sums over the data-parallel ranks; all ranks of the actor call it together.

    The ranks of one replica of the model have the same sums, or none where they have no loss: of each, one counts.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return weights
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (dp_rank, weights))
    return total({rank: sums for rank, sums in found if sums.sequences}.values())
