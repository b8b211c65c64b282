"""A transformer's layers for Megatron in plain torch, in place of Transformer Engine's: attention, norms, linears.

Attention is torch's scaled_dot_product_attention, causal, also over packed sequences. On a card all sequences of a pack
share one call of torch's flash attention. Elsewhere each is attended to in a call of its own. Only short ones, for
which a call costs more than the padding, share one with others of about their length. On the host it is computed in
fp32: torch's kernel there takes up to five times as long for the gradients of bf16, and in fp32 is no slower and more
exact.

Parameters have the names that Transformer Engine gives them: bridges between HF and Megatron map
`linear_qkv.layer_norm_weight` and the like, so the fused norm and linear keeps that name, and that of its class.
Only the choice of fp32 is specific to the host, and the kernel for packs to a card.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.torch_version import TorchVersion

from seamless_verl.platform.adaptation import FINAL_NORM, ROUTER_PRODUCT, SPEC_PROVIDER
from seamless_verl.shared_prefixes.forward import ForestParams
from seamless_verl.shared_prefixes.layout import Forest

SHORT = 64  # tokens of a sequence that shares a call
HALVES = (torch.bfloat16, torch.float16)
AMPERE = (8, 0)  # the first compute capability that torch's flash attention has code for


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
        if isinstance(packed_seq_params, ForestParams) and packed_seq_params.forest is not None:
            if self.has_kernel_for_packs(query, value):
                return self.attend_paths(query, key, value, packed_seq_params)
            return self.attend_forest(query, key, value, packed_seq_params.forest)
        if packed_seq_params is not None:
            lengths = sequence_lengths(packed_seq_params)
            if sum(lengths) != len(query):  # a kernel would read beyond the tensors
                raise ValueError(
                    f"{sum(lengths)} packed tokens, of which this rank has {len(query)}: these layers have no "
                    "context parallelism. Set actor_rollout_ref.actor.megatron.context_parallel_size=1"
                )
            if self.has_kernel_for_packs(query, value):
                bounds, longest = sequence_bounds(packed_seq_params), max(lengths)
                return self.attend_pack(query, key, value, (bounds, bounds), (longest, longest))
            return self.attend_packed(query, key, value, lengths)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = self.attend(q, k, v, None if attention_mask is None else ~attention_mask)
        return out.permute(2, 0, 1, 3).flatten(2)

    def has_kernel_for_packs(self, query: Tensor, value: Tensor) -> bool:
        """Whether torch's flash attention for packed sequences takes these: 16 bits, heads of one size, no dropout."""
        size = query.shape[-1]
        fits = size == value.shape[-1] and size <= 256 and size % 8 == 0 and query.dtype in HALVES
        return fits and not (self.training and self.dropout) and has_flash_attention(query.device)

    def attend_pack(
        self, query: Tensor, key: Tensor, value: Tensor, bounds: tuple[Tensor, Tensor], longest: tuple[int, int]
    ) -> Tensor:
        """One kernel for all sequences of a pack, whose queries and keys begin at `bounds` [sequences + 1], int32.

        Where a sequence has more keys than queries, the last ones align. Heads that share a key and a value have copies
        of them. The kernel's source takes groups of heads too, but only this was seen on a card.
        """
        from torch.nn.attention.varlen import varlen_attn  # imports what only a card needs

        k, v = (of_each_head(x, query.shape[1], dim=1) for x in (key, value))
        out = varlen_attn(query, k, v, *bounds, *longest, scale=self.scale, window_size=(-1, 0))
        return out.flatten(1)  # type: ignore[union-attr]

    def attend_packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        parts = [x.split(lengths) for x in (query, key, value)]
        out: list[Tensor | None] = [None] * len(lengths)
        for members in group_by_length(lengths):
            padded = (pad_sequence([part[i] for i in members], batch_first=True) for part in parts)
            q, k, v = (x.transpose(1, 2) for x in padded)
            rows = self.attend(q, k, v, None).transpose(1, 2)  # padding is on the right: causality hides it
            for i, row in zip(members, rows, strict=True):
                out[i] = row[: lengths[i]]
        return torch.cat([part for part in out if part is not None]).flatten(1)

    def attend_paths(self, query: Tensor, key: Tensor, value: Tensor, packed: ForestParams) -> Tensor:
        """As `attend_forest`, in one kernel, with a copy of the keys that each segment sees."""
        assert packed.forest is not None
        rows, *bounds = packed.seen
        seen = (x.index_select(0, rows) for x in (key, value))
        longest = max(packed.forest.lengths), max(packed.forest.seen_lengths)
        return self.attend_pack(query, *seen, (bounds[0], bounds[1]), longest)

    def attend_forest(self, query: Tensor, key: Tensor, value: Tensor, forest: Forest) -> Tensor:
        """Each segment attends to those that it continues, and to itself causally: a call for each, no mask over all.

        torch's causal attention aligns the first query with the first key. Where there are more keys, the last ones
        align, and a mask of the segment's queries by its keys says so.
        """
        queries, keys, values = (x.split(forest.lengths) for x in (query, key, value))
        out = []
        for own, ancestors in enumerate(forest.ancestors):
            seen = [*ancestors, own]
            rows = [queries[own], torch.cat([keys[i] for i in seen]), torch.cat([values[i] for i in seen])]
            q, k, v = (x.transpose(0, 1)[None] for x in rows)
            behind = k.shape[2] - q.shape[2]
            mask = q.new_ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(behind) if behind else None
            out.append(self.attend(q, k, v, mask)[0].transpose(0, 1))
        return torch.cat(out).flatten(1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """[b, heads, s, d] attention in which a group of heads shares each key and value head."""
        if mask is not None and q.device.type != "cpu":  # a card's kernels for masks take no groups of heads
            k, v = (of_each_head(x, q.shape[1], dim=1) for x in (k, v))
        as_fp32 = q.device.type == "cpu" and q.itemsize < 4
        out = F.scaled_dot_product_attention(
            *((x.float() for x in (q, k, v)) if as_fp32 else (q, k, v)),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.to(q.dtype)


def of_each_head(x: Tensor, heads: int, dim: int) -> Tensor:
    """Keys or values of groups of heads, once for each head."""
    return x.repeat_interleave(heads // x.shape[dim], dim=dim) if heads != x.shape[dim] else x


@cache
def has_flash_attention(device: torch.device) -> bool:
    """Whether torch has flash attention for packed sequences on this device: on NVIDIA's cards, from torch 2.11 on."""
    if device.type != "cuda" or torch.version.hip is not None or torch.__version__ < TorchVersion("2.11"):
        return False
    return torch.cuda.get_device_capability(device) >= AMPERE


def sequence_bounds(packed: Any) -> Tensor:
    """Where the packed sequences begin and end, padding included: [sequences + 1], int32."""
    padded = packed.cu_seqlens_q_padded
    return packed.cu_seqlens_q if padded is None else padded  # type: ignore[no-any-return]


def sequence_lengths(packed: Any) -> list[int]:
    """Lengths of the packed sequences, padding included; computed once for each batch."""
    if not hasattr(packed, "seamless_lengths"):
        packed.seamless_lengths = sequence_bounds(packed).diff().tolist()
    return packed.seamless_lengths  # type: ignore[no-any-return]


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Indices of nonempty sequences, grouped by call: short ones of about the same length; each other alone."""
    groups: dict[tuple[int, int], list[int]] = {}
    for i, length in enumerate(lengths):
        if length:
            groups.setdefault((length.bit_length(), 0 if length < SHORT else i), []).append(i)
    return list(groups.values())


class TorchNorm(nn.Module):
    """RMSNorm or LayerNorm as the config says, over the last dimension.

    Its parameters carry `sequence_parallel`, by which Megatron knows that their gradients are
    partial on each tensor-parallel rank and must be summed.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.rms = config.normalization == "RMSNorm"
        self.shape, self.eps = (hidden_size,), eps
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = norm_parameter(config, hidden_size, 1.0 - self.offset)
        self.bias = None if self.rms else norm_parameter(config, hidden_size, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.weight + self.offset if self.offset else self.weight, self.bias, self.eps)


def norm_parameter(config: Any, size: int, value: float) -> nn.Parameter:
    parameter = nn.Parameter(torch.full((size,), value, dtype=config.params_dtype))
    parameter.sequence_parallel = config.sequence_parallel
    return parameter


def normalize(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm, then column-parallel linear: [s, b, h] to [s, b, out / tp].

    With `return_layernorm_output`, as in Transformer Engine, the norm's output comes beside the linear's: an adapter's
    input, where the adapter is beside the linear alone.
    """

    return_layernorm_output = False

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.layer_norm_weight = norm_parameter(config, input_size, 1.0 - self.offset)
        rms = config.normalization == "RMSNorm"
        self.layer_norm_bias = None if rms else norm_parameter(config, input_size, 0.0)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor | None]:
        weight = self.layer_norm_weight + self.offset if self.offset else self.layer_norm_weight
        normed = normalize(input_, weight, self.layer_norm_bias, self.eps)
        output, bias = super().forward(normed, *args, **kwargs)
        return ((output, normed) if self.return_layernorm_output else output), bias


class TorchSpecProvider:
    """Which module Megatron builds for each part of a layer; the protocol is its BackendSpecProvider."""

    def linear(self) -> type:
        return ColumnParallelLinear

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return TELayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return TorchNorm

    def core_attention(self) -> type:
        return SDPAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> Any:
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import TEGroupedMLP

        from seamless_verl.platform.megatron.experts import TEColumnParallelGroupedLinear, TERowParallelGroupedLinear

        return TEGroupedMLP, MLPSubmodules(
            linear_fc1=TEColumnParallelGroupedLinear, linear_fc2=TERowParallelGroupedLinear
        )

    def activation_func(self) -> type | None:
        return None


def use_torch_layers() -> None:
    """Give Megatron, in this process, these layers where it asks for Transformer Engine's.

    Both bridges ask for them, and Transformer Engine must be compiled for the machine. Called before a model is built;
    may be called again.

    Raises:
        HostMovedError: Megatron has moved the function that names the provider.
    """
    # torch prefers cuDNN's attention on recent cards, which makes a plan for every new length, and here almost every
    # sequence is one. Flash attention has none.
    torch.backends.cuda.enable_cudnn_sdp(False)

    specs = sys.modules[SPEC_PROVIDER.verify().__module__]
    specs.TESpecProvider, specs.TENorm, specs.HAVE_TE = TorchSpecProvider, TorchNorm, True  # type: ignore[attr-defined]
    FINAL_NORM.find()
    sys.modules[FINAL_NORM.symbol.partition(":")[0]].LayerNormImpl = TorchNorm  # type: ignore[attr-defined]
    moe = sys.modules[ROUTER_PRODUCT.verify().__module__]
    vars(moe).setdefault("te_general_gemm", None)  # then it multiplies with torch
