"""Matrix products of bf16 on processors for which oneDNN has none.

oneDNN multiplies bf16 from AVX-512 on. Without it torch 2.11 and 2.13 do so in a plain loop: 917 ms for [2048, 256] by
[256, 1024] on one core with AVX2, where fp32 takes 16 ms and the casts 0.3 ms. So they are multiplied in fp32 and the
result is rounded to bf16, which is also what oneDNN does: it sums in fp32.

torch has no setting for it, so its kernels for the host are replaced by name, for all of a process. Other products run
torch's own kernels through the variants that write into a given tensor, which are operators of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
SLOW = ("NO AVX", "AVX2")  # of torch.backends.cpu.get_cpu_capability


@cache
def multiply_bf16_in_fp32() -> torch.library.Library | None:
    """Replace the kernels of this process, once, on a processor that needs it.

    They last as long as the library that is returned, which the cache keeps.
    """
    if torch.backends.cpu.get_cpu_capability() not in SLOW:
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
        for name in PRODUCTS:
            library.impl(name, product(getattr(torch.ops.aten, name).out), "CPU")
    return library


def product(into: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The product that `into` writes to `out`: [n, m], or [b, n, m] in a batch. Its last two operands are matrices."""

    def multiply(*operands: Tensor, **scales: Any) -> Tensor:
        dtype = operands[-1].dtype
        if all(operand.dtype is torch.bfloat16 for operand in operands):  # torch refuses a mixture
            operands = tuple(operand.float() for operand in operands)
        left, right = operands[-2:]
        out = left.new_empty(*left.shape[:-1], right.shape[-1])
        return into(*operands, **scales, out=out).to(dtype)

    return multiply
