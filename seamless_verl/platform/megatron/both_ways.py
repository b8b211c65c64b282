"""A few sequences through a model both ways: with what they share computed once, and each by itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

logger = logging.getLogger(__name__)
LARGEST = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Mean difference of a token's logprob or value, relative to their mean size, that summation order explains."""
OF_16_BITS = 0.05


def agrees(engine: Any, ask: Callable[[], dict[str, Any]]) -> bool:
    """Whether all ranks' engines find the same of `few_sequences` both ways; `ask` returns what verl's pass does.

    A warning names the difference where it is too large, and says that each sequence is computed by itself.
    """
    both = []
    for sharing in (False, True):
        engine.sharing = sharing
        both.append(outputs(engine, ask()))
    found = largest_of_ranks(relative_difference(*both))
    limit = LARGEST.get(engine.param_dtype, OF_16_BITS)
    if found > limit:
        logger.warning(
            "seamless.shared_prefixes=auto computes each sequence alone: with prefixes computed once this model says"
            " something else, by %.2g of the size of its outputs, where rounding explains %.2g",
            *(found, limit),
        )
    return found <= limit


def few_sequences(engine: Any) -> Any:
    """A batch of two prompts with three samples each, of random ids, the same on all ranks."""
    draw = torch.Generator().manual_seed(0)
    size = int(engine.model_config.hf_config.vocab_size)
    prompts = [torch.randint(size, (length,), generator=draw) for length in (24, 9)]
    ids = [torch.cat([prompt, torch.randint(size, (7 + n,), generator=draw)]) for prompt in prompts for n in range(3)]
    nested = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(one)) for one in ids],
        "loss_mask": [torch.ones_like(one) for one in ids],
    }
    columns = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in nested.items()}
    return tu.get_tensordict(
        columns,
        {
            **{"use_remove_padding": True, "use_dynamic_bsz": True, "use_fused_kernels": False, "temperature": 1.0},
            **{"pad_mode": "no_padding", "max_token_len_per_gpu": sum(map(len, ids))},
        },
    )


def outputs(engine: Any, result: dict[str, Any]) -> list[Tensor]:
    """What is said of each token but a sequence's last, which has no logprob; empty before the last stage."""
    if not engine.is_mp_src_rank_with_outputs():
        return []
    model_output = result["model_output"]
    name = next(name for name in ("log_probs", "values") if name in model_output)
    return [row[:-1].double() for row in model_output[name].unbind()]


def relative_difference(one: list[Tensor], other: list[Tensor]) -> float:
    """The mean absolute difference, of the mean absolute size."""
    if not one:
        return 0.0
    first, second = torch.cat(one), torch.cat(other)
    return float((first - second).abs().mean() / first.abs().mean().clamp(min=1e-12))


def largest_of_ranks(number: float) -> float:
    """The largest of all ranks; not a number counts as infinite."""
    found = torch.tensor([number if number == number else float("inf")], device=get_device_name())
    torch.distributed.all_reduce(found, op=ReduceOp.MAX)
    return float(found.item())
