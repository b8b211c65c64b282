"""Corrects how vLLM verifies drafts on the host, where requests are sampled and not greedy.

vLLM's host version of the kernel that repeats a request's temperature, top_p and top_k for each of its drafts writes
into a copy where they are no int64, and the sampler goes on with memory that nothing was written to. So drafts are
verified against another distribution than the model's, and an engine dies of a `top_k` that is no token's number. In
0.24, besides, the kernel that draws a token in place of a rejected draft does not take an argument that it is given.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from vllm.v1.sample import rejection_sampler

from seamless_verl.platform.adaptation import DRAWN_FOR_REJECTED, REPEATED_FOR_DRAFTS

FP64 = "USE_FP64_GUMBEL"  # the host's kernel takes its numbers in either precision


def verify_drafts_on_host() -> None:
    """Make this process verify drafts against the model's distribution; may be called again.

    Raises:
        HostMovedError: vLLM has moved what it verifies drafts by.
    """
    if rejection_sampler.expand_batch_to_tokens is expand_batch_to_tokens:
        return
    REPEATED_FOR_DRAFTS.find()
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    draw = cast(Any, DRAWN_FOR_REJECTED.find())
    if FP64 not in inspect.signature(draw).parameters:  # 0.24

        def draw_without(*args: Any, **kwargs: Any) -> None:
            draw(*args, **{name: value for name, value in kwargs.items() if name != FP64})

        rejection_sampler.sample_recovered_tokens_kernel.func = draw_without


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Each request's value [requests], once for each of its tokens [tokens]; `cu_num_tokens` adds their numbers up."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts.to(torch.int64), output_size=num_tokens)
