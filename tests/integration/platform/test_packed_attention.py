"""Attention over a pack in one kernel: what is handed to torch, and who is sent elsewhere. A card runs the kernel."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from seamless_verl.platform.megatron import layers
from seamless_verl.platform.megatron.layers import SDPAttention

LENGTHS, HEADS, GROUPS, SIZE = [5, 70, 0, 9], 4, 2, 32


def attention(dropout: float = 0.0) -> SDPAttention:
    return SDPAttention(SimpleNamespace(kv_channels=SIZE, attention_dropout=dropout), 1)


def pack(lengths: list[int] = LENGTHS) -> Any:
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return SimpleNamespace(cu_seqlens_q=bounds, cu_seqlens_q_padded=None)


def inputs(tokens: int = sum(LENGTHS), dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(tokens, heads, SIZE, dtype=dtype) for heads in (HEADS, GROUPS, GROUPS)]


def one_by_one(query: Tensor, key: Tensor, value: Tensor, begins: Tensor, ends: Tensor, *_: int, **kwargs: Any) -> Any:
    """What the kernel computes, by its documentation: here for as many keys as queries."""
    assert begins is ends and begins.dtype == torch.int32
    assert (
        kwargs == {"scale": pytest.approx(SIZE**-0.5), "window_size": (-1, 0)}
        and query.shape == key.shape == value.shape
    )
    parts = [x.split(begins.diff().tolist()) for x in (query, key, value)]
    rows = [
        torch.nn.functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in row), is_causal=True)
        for row in zip(*parts, strict=True)
    ]
    return torch.cat([row.transpose(0, 1) for row in rows])


def test_the_kernel_gets_the_pack_and_gives_what_a_call_for_each_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = attention()(*inputs(), None, packed_seq_params=pack())
    monkeypatch.setattr(layers, "has_flash_attention", lambda device: True)
    monkeypatch.setattr(layers, "HALVES", (torch.float32,))
    called = list[tuple[int, int]]()

    def kernel(*args: Any, **kwargs: Any) -> Any:
        called.append(args[5:])
        return one_by_one(*args, **kwargs)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    torch.testing.assert_close(attention()(*inputs(), None, packed_seq_params=pack()), expected)
    assert called == [(70, 70)]


def test_what_the_kernel_does_not_take_is_attended_to_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    query, _, value = inputs(dtype=torch.bfloat16)
    assert not attention().has_kernel_for_packs(query, value), "a host has no such kernel"
    monkeypatch.setattr(layers, "has_flash_attention", lambda device: True)
    assert attention().has_kernel_for_packs(query, value) and attention(0.1).eval().has_kernel_for_packs(query, value)
    assert not attention(0.1).has_kernel_for_packs(query, value)
    for q, v in ((query.float(), value.float()), (query, value[..., :16]), (query[..., :20], value[..., :20])):
        assert not attention().has_kernel_for_packs(q, v)


def test_a_rank_with_other_tokens_than_the_pack_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"84 packed tokens, of which this rank has 42: .*context_parallel_size=1"):
        attention()(*inputs(42), None, packed_seq_params=pack())


def test_torch_has_the_kernel_with_these_parameters() -> None:
    given = inspect.signature(varlen.varlen_attn).parameters
    wanted = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert list(given)[:7] == wanted and {"scale", "window_size"} <= set(given)
