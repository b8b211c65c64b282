"""Causal attention by torch's scaled_dot_product_attention, also over packed sequences.

A packed sequence is attended to by itself; only short ones, for which a call costs more than the padding, share one
with others of about their length. On the host it is computed in fp32: torch's kernel there takes up to five times as
long for the gradients of bf16, and is no slower, and more exact, in fp32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

SHORT = 64  # tokens


class SDPAttention(nn.Module):
    """Megatron's core attention.

    Inputs are query [s, b, heads / tp, d], key and value [s, b, groups / tp, d] and the result is
    [s, b, heads * d / tp]; packed ("thd"), they are [t, heads / tp, d] and [t, heads * d / tp].
    """

    def __init__(self, config: Any, layer_number: int, *_: Any, softmax_scale: float | None = None, **__: Any):
        super().__init__()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *_: Any,
        packed_seq_params: Any = None, **__: Any,
    ) -> Tensor:  # fmt: skip
        if packed_seq_params is not None:
            return self.packed(query, key, value, sequence_lengths(packed_seq_params))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = self.attend(q, k, v, None if attention_mask is None else ~attention_mask)
        return out.permute(2, 0, 1, 3).flatten(2)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        parts = [x.split(lengths) for x in (query, key, value)]
        out: list[Tensor | None] = [None] * len(lengths)
        for members in by_length(lengths):
            padded = (pad_sequence([part[i] for i in members], batch_first=True) for part in parts)
            q, k, v = (x.transpose(1, 2) for x in padded)
            rows = self.attend(q, k, v, None).transpose(1, 2)  # padding is on the right: causality hides it
            for i, row in zip(members, rows, strict=True):
                out[i] = row[: lengths[i]]
        return torch.cat([part for part in out if part is not None]).flatten(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[b, heads, s, d] attention in which a group of heads shares each key and value head."""
        widened = q.device.type == "cpu" and q.itemsize < 4
        out = F.scaled_dot_product_attention(
            *((x.float() for x in (q, k, v)) if widened else (q, k, v)),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.to(q.dtype)


def sequence_lengths(packed: Any) -> list[int]:
    """Lengths of the packed sequences, padding included; computed once for each batch."""
    if not hasattr(packed, "seamless_lengths"):
        bounds = packed.cu_seqlens_q_padded
        bounds = packed.cu_seqlens_q if bounds is None else bounds
        packed.seamless_lengths = bounds.diff().tolist()
    return packed.seamless_lengths  # type: ignore[no-any-return]


def by_length(lengths: list[int]) -> list[list[int]]:
    """Indices of nonempty sequences: those of short ones whose lengths are within a factor of two, each other alone."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, length in enumerate(lengths):
        if length:
            groups.setdefault((length.bit_length(), 0 if length < SHORT else i), []).append(i)
    return list(groups.values())
