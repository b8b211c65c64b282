"""The transformer's layers in plain torch, under the names Transformer Engine gives its parameters.

Bridges between HF and Megatron map `linear_qkv.layer_norm_weight` and the like, so the fused norm
and linear keeps that name, and that of its class. Nothing here is specific to the host: it also
serves an accelerator without Transformer Engine.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn


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
    """Norm, then column-parallel linear: [s, b, h] to [s, b, out / tp]."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.layer_norm_weight = norm_parameter(config, input_size, 1.0 - self.offset)
        rms = config.normalization == "RMSNorm"
        self.layer_norm_bias = None if rms else norm_parameter(config, input_size, 0.0)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        weight = self.layer_norm_weight + self.offset if self.offset else self.layer_norm_weight
        return super().forward(normalize(input_, weight, self.layer_norm_bias, self.eps), *args, **kwargs)


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
        from seamless_verl.platform.megatron.attention import SDPAttention

        return SDPAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> Any:
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe.experts import SequentialMLP

        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)

    def activation_func(self) -> type | None:
        return None
