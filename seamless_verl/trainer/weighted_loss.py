"""verl's loss functions with the rows' weights, in the trainer's workers: trainer/session_weight.py says why.

It is apart, so that a worker imports no more of verl than its losses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from verl.trainer.ppo import core_algos
from verl.workers.utils import losses

from seamless_verl.platform.adaptation import rebound

WEIGHT = "session_weight"
"""A column of TransferQueue: float32 [1], a row's share of the trained tokens of its session."""
MEAN_OF_MEANS = "seq-mean-token-mean"


def weighted_agg_loss(weights: torch.Tensor, loss_mat: torch.Tensor, **arguments: Any) -> torch.Tensor:
    """verl's `agg_loss` with the rows' weights, float [rows], where it averages over rows."""
    if arguments["loss_agg_mode"] == MEAN_OF_MEANS:
        loss_mat = loss_mat * weights.to(loss_mat.dtype)[:, None]
        if arguments.get("global_batch_size") is None and arguments.get("dp_size", 1) == 1:
            has_tokens = arguments["loss_mask"].sum(dim=-1) > 0
            arguments["global_batch_size"] = weights[has_tokens].sum()  # rows weigh 1 together, for each session
    return core_algos.agg_loss(loss_mat, **arguments)


def weighs_sessions(loss: Callable[..., Any]) -> Callable[..., Any]:
    """verl's loss function, which weighs rows by the column WEIGHT if the micro-batch has it.

    The function aggregates in `core_algos` (policy and value losses) and in `losses` (entropy and KL).
    """

    @wraps(loss)
    def weighted(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        if WEIGHT not in data.keys():  # noqa: SIM118 - a TensorDict
            return loss(model_output=model_output, data=data, dp_group=dp_group)
        original = core_algos.agg_loss
        column = data[WEIGHT]
        weights = (column.values() if column.is_nested else column).reshape(-1).to(device_of(model_output))

        def agg_loss(loss_mat: Any, loss_mask: Any, loss_agg_mode: str, *more: Any, **arguments: Any) -> Any:
            arguments |= dict(zip(("dp_size", "batch_num_tokens", "global_batch_size"), more, strict=False))
            with rebound(core_algos, agg_loss=original):
                return weighted_agg_loss(
                    weights, loss_mat, loss_mask=loss_mask, loss_agg_mode=loss_agg_mode, **arguments
                )

        with rebound(core_algos, agg_loss=agg_loss), rebound(losses, agg_loss=agg_loss):
            return loss(model_output=model_output, data=data, dp_group=dp_group)

    return weighted


def device_of(model_output: Any) -> torch.device:
    """The device of what the model computed."""
    tensor = next(value for value in model_output.values() if isinstance(value, torch.Tensor))
    return tensor.device
