"""A mixture's experts for Megatron in plain torch, in place of Transformer Engine's grouped linears.

Megatron's `TEGroupedMLP` is plain torch but for its two linears, which have the parameters of all experts of a rank,
`weight0` and on, and multiply the tokens of each expert by its own. Bridges between HF and Megatron know no other names
for experts. The classes here have the names of Transformer Engine's, by which Megatron-Bridge knows how ranks share
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_gpu, set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from verl.utils.device import get_device_id

from seamless_verl.errors import ConfigError

BIASES = "actor_rollout_ref.actor.megatron.override_transformer_config.add_bias_linear"


class TorchGroupedLinear(nn.Module):
    """The same linear of each of a rank's experts: [t, in] to [t, out], the tokens of an expert behind each other.

    `weight<i>` is [out, in] of the rank's i-th expert. Ranks of expert tensor parallelism share `out` or `in`, as
    `split` says; the token dispatcher gathers and sums for them.

    Raises:
        ConfigError: the experts have biases.
    """

    split: int  # the dimension of a weight that is divided among ranks of expert tensor parallelism

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise ConfigError(BIASES, True, "experts with biases need Transformer Engine", "Train another model")
        self.count = num_gemms
        self.groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        shape = [output_size, input_size]
        shape[self.split] //= self.groups.expt_tp.size()
        device = "cpu" if config.use_cpu_initialization else get_device_id()
        for i in range(num_gemms):
            weight = nn.Parameter(torch.empty(shape, device=device, dtype=config.params_dtype))
            # Megatron sums the gradients of such a parameter over the ranks that have the same experts only.
            weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            if config.perform_initialization:
                _initialize_affine_weight_gpu(weight, init_method, self.split, is_expert=True)
            else:
                set_tensor_model_parallel_attributes(weight, True, self.split, 1)
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x: Tensor, tokens_per_expert: Sequence[int]) -> tuple[Tensor, None]:
        """The second value is where Megatron expects biases."""
        parts = zip(x.split(list(tokens_per_expert)), self.parameters(), strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts]), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Megatron's description of the weights for a checkpoint, under the keys that its other kinds of experts have:
        one weight with the experts as its first dimension, or one for each where `singleton_local_shards` asks for it.
        """
        assert metadata is not None
        single, ep = metadata.get("singleton_local_shards", False), self.groups.ep
        described = {}
        for i, weight in enumerate(self.parameters()):
            expert = ep.rank() * self.count + i
            offsets = () if single else ((len(sharded_offsets), expert, ep.size() * self.count),)
            (tensor,) = make_sharded_tensors_for_checkpoint(
                {"weight": weight}, f"{expert}.{prefix}" if single else prefix, {"weight": self.split},
                (*sharded_offsets, *offsets), tp_group=self.groups.expt_tp, dp_cp_group=metadata["dp_cp_group"],
            ).values()  # fmt: skip
            # A copy for each rank that has the same experts, which the dense layers' data parallel ranks do not.
            tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
            described[f"{prefix}weight{i}"] = tensor
        return described

    def backward_dw(self) -> None:
        """The gradients of the weights are there after the backward pass."""


class TEColumnParallelGroupedLinear(TorchGroupedLinear):
    """Ranks of expert tensor parallelism have rows of each weight."""

    split = 0


class TERowParallelGroupedLinear(TorchGroupedLinear):
    """Ranks of expert tensor parallelism have columns of each weight, and partial sums of the result."""

    split = 1
