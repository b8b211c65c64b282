"""verl's losses in the trainer's workers, with what they are not given: tokens' weight versions and rows' weights.

The trainer sends the numbers of an update with its batch, under UPDATE, and the weights of rows as the column WEIGHT:
`trainer/session_weight.py` says why. `seamless.correction.scale_lr` also scales the learning rate of each step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from verl.trainer.distillation import losses as distillation
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.workers.utils import losses
from verl.workers.utils.padding import no_padding_2_padding

from seamless_verl.algorithms import LOSSES
from seamless_verl.algorithms.clipped import log_ratio
from seamless_verl.algorithms.ess_scaling import WeightSums, total, weight_sums
from seamless_verl.algorithms.loss_call import CONTEXT, LossCall, this_call
from seamless_verl.config.schema import CorrectionConfig
from seamless_verl.platform.adaptation import rebound
from seamless_verl.trainer.finite_updates import KEYS, ROW, UpdateHooks, around, around_loss
from seamless_verl.trainer.instruments import SEEN_ENTROPY, Instruments, measure_entropy
from seamless_verl.trajectory.records import Grammar

UPDATE = "seamless_update"
"""In a batch's `extra_info`: the numbers of `update_numbers`."""
WEIGHT = "session_weight"
"""A column of TransferQueue: float32 [1], a row's share of the trained tokens of its session."""
COMPARED = "seamless_compared"
"""In a batch's `extra_info`: the key of a row whose logprobs of the first mini-batch are kept, or ""."""
MEAN_OF_MEANS = "seq-mean-token-mean"


def update_numbers(
    correction: CorrectionConfig, step: int, update: int, updates: int, *, measures: bool = False
) -> dict[str, Any]:
    """Of update number `update` (from 0) of `updates` in the trainer's step `step` (from 1); `measures` what a forward
    pass before it would have."""
    return {
        "proximal": step - 1 + update / updates,
        "share": 1 / updates,  # of a version
        "scale_lr": correction.scale_lr,
        "measures": measures,
    }


class CorrectedUpdates(UpdateHooks):
    """Gives policy losses their `LossCall`, and steps their learning rate; every rank of the actor has one.

    Owned state, while an update runs: its numbers, how many of its optimizer steps are done, and the importance weights
    and instruments of the mini-batch, as far as this rank has computed its loss; and the logprobs that were kept last.
    """

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        self.numbers: dict[str, Any] | None = None
        self.done, self.steps = 0, 1
        self.compared_row, self.compared = -1, torch.empty(0)
        self.weights, self.instruments = WeightSums(), Instruments()
        measure_entropy(self.engine, lambda: self._measures)

    def update(self, train_mini_batch: Callable[[Any], Any], data: Any) -> Any:
        self.numbers = tu.get_non_tensor_data(data, UPDATE, None)
        rows = len(data) * self.engine.get_data_parallel_size()
        epochs = tu.get_non_tensor_data(data, "epochs", 1)
        self.done, self.compared_row, self.compared = 0, compared_row(data), torch.empty(0)
        self.steps = max(1, rows // tu.get_non_tensor_data(data, "mini_batch_size", rows) * epochs)
        try:
            return train_mini_batch(data)
        finally:
            self.numbers, self.compared_row = None, -1

    def mini_batch(self, train_batch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Adds its effective sample size and its instruments to the metrics."""
        self.weights, self.instruments = WeightSums(), Instruments()
        output = train_batch(*args, **kwargs)
        if self.engine.is_mp_src_rank_with_outputs():
            if self._scales:
                output["metrics"]["ess_ratio"] = [self.weights.ess_ratio]
                output["metrics"]["lr_scale"] = [self.weights.lr_scale]
            output["metrics"].update(self.instruments.metrics(self.engine.get_data_parallel_size()))
        return output

    def optimizer_step(self, optimizer_step: Callable[[], Any]) -> Any:
        """One step, at the learning rate that the mini-batch's effective sample size allows."""
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

    @property
    def _scales(self) -> bool:
        return self.numbers is not None and bool(self.numbers["scale_lr"])

    @property
    def _measures(self) -> bool:
        return self.numbers is not None and bool(self.numbers["measures"])

    def correcting(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        """verl's loss function, in which policy losses find their `LossCall`."""
        return around_loss(loss, self._corrected)

    def _corrected(self, loss: Callable[..., Any], model_output: Any, data: Any, dp_group: Any) -> Any:
        if self.numbers is None or "weight_version" not in data.keys():  # noqa: SIM118 - a TensorDict
            return loss(model_output=model_output, data=data, dp_group=dp_group)
        find = losses.get_policy_loss_fn
        if self._measures and (entropy := model_output.get(SEEN_ENTROPY, model_output.get("entropy"))) is not None:
            mask = data["response_mask"].to_padded_tensor(0)
            self.instruments.add_entropy(no_padding_2_padding(entropy, data), mask)

        def found(name: str) -> Callable[..., Any]:
            needed = self._scales or self._measures or self.compared_row >= 0 or name in LOSSES
            return around(find(name), partial(self._policy_loss, data)) if needed else find(name)

        with rebound(losses, get_policy_loss_fn=found):
            return loss(model_output=model_output, data=data, dp_group=dp_group)

    def _policy_loss(
        self,
        data: Any,
        policy_loss: Callable[..., Any],
        *,
        old_log_prob: Any,
        log_prob: Any,
        response_mask: Any,
        **arguments: Any,
    ) -> Any:
        assert self.numbers is not None
        if self._scales:
            behavior = data["rollout_log_probs"] if "rollout_log_probs" in data.keys() else None  # noqa: SIM118
            sampled = old_log_prob if behavior is None else padded(behavior, old_log_prob, 0.0)
            self.weights += weight_sums(log_ratio(log_prob.detach(), sampled), response_mask)
        if self._measures and not self.done and "grammar" in data.keys():  # noqa: SIM118
            labels = padded(data["grammar"], response_mask.long(), Grammar.NONE)
            self.instruments.add_rows(log_prob, old_log_prob, response_mask, labels)
        if self.compared_row >= 0 and not self.done and self.compared_row in (rows := data[ROW].tolist()):
            self.compared = log_prob[rows.index(self.compared_row)].detach().clone()
        versions, proximal = padded(data["weight_version"], response_mask.long(), CONTEXT), self.numbers["proximal"]
        current = proximal + self.numbers["share"] * self.done / self.steps
        with this_call.during(LossCall(versions, proximal, current)):
            return policy_loss(old_log_prob=old_log_prob, log_prob=log_prob, response_mask=response_mask, **arguments)


def compared_row(data: Any) -> int:
    """The number, among the rows of all ranks, of the row whose logprobs are kept; -1: none."""
    key = tu.pop(data, COMPARED, default="")
    keys = tu.get_non_tensor_data(data, KEYS, "").splitlines() if key else []
    return keys.index(key) if key in keys else -1


def padded(column: Any, like: torch.Tensor, empty: float) -> torch.Tensor:
    """A column of responses, nested or [rows, any], as `like` is: [rows, response], of its dtype, on its device.

    Where a row has no value, it is `empty`. verl's padding rows have other rows' columns, of other lengths, masked.
    """
    rows = column.unbind() if column.is_nested else column
    full = torch.full_like(like, empty)
    for target, row in zip(full, rows, strict=True):
        length = min(len(row), len(target))
        target[:length] = row[:length]
    return full


def of_all_ranks(weights: WeightSums, dp_rank: int) -> WeightSums:
    """The sums over the data-parallel ranks, which call it together; of those of one copy of the model one counts."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return weights
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, (dp_rank, weights))
    return total({rank: sums for rank, sums in found if sums.sequences}.values())


def weighted_agg_loss(weights: torch.Tensor, loss_mat: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """verl's `agg_loss` with the rows' weights, float [rows], where it averages over rows."""
    if arguments["loss_agg_mode"] == MEAN_OF_MEANS:
        loss_mat = loss_mat * weights.to(loss_mat.dtype)[:, None]
        if arguments.get("global_batch_size") is None and arguments.get("dp_size", 1) == 1:
            has_tokens = arguments["loss_mask"].sum(dim=-1) > 0
            arguments["global_batch_size"] = weights[has_tokens].sum()  # rows weigh 1 together, for each session
    return core_algos.agg_loss(loss_mat, **arguments)


def weighs_sessions(loss: Callable[..., Any]) -> Callable[..., Any]:
    """verl's loss function, which weighs rows by the column WEIGHT if the micro-batch has it."""

    def weighted(loss: Callable[..., Any], model_output: Any, data: Any, dp_group: Any) -> Any:
        if WEIGHT not in data.keys():  # noqa: SIM118 - a TensorDict
            return loss(model_output=model_output, data=data, dp_group=dp_group)
        original = core_algos.agg_loss
        column = data[WEIGHT]
        device = next(value.device for value in model_output.values() if isinstance(value, torch.Tensor))
        weights = (column.values() if column.is_nested else column).reshape(-1).to(device)

        def agg_loss(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, *more: Any, **arguments: Any) -> Any:
            arguments |= dict(zip(("dp_size", "batch_num_tokens", "global_batch_size"), more, strict=False))
            with rebound(core_algos, agg_loss=original):
                return weighted_agg_loss(
                    weights, loss_mat, loss_mask=loss_mask, loss_agg_mode=loss_agg_mode, **arguments
                )

        with (
            rebound(core_algos, agg_loss=agg_loss),
            rebound(losses, agg_loss=agg_loss),
            rebound(distillation, agg_loss=agg_loss),
        ):
            return loss(model_output=model_output, data=data, dp_group=dp_group)

    return around_loss(loss, weighted)
