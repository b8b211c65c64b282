"""A small GPT of Megatron-core in our plain layers, in a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from seamless_verl.platform.megatron.adapt import adapt_megatron


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    adapt_megatron()
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    mpu.initialize_model_parallel()
    model_parallel_cuda_manual_seed(0)
    yield
    mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def small_gpt(dtype: torch.dtype, vocabulary: int = 64, **more: Any) -> GPTModel:
    """Grouped queries, norms of queries and keys, and rotary embeddings, as Qwen3 has them."""
    sizes: dict[str, Any] = dict(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2)
    sizes |= dict(ffn_hidden_size=64, kv_channels=8)
    config = TransformerConfig(
        **sizes | more, normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, qk_layernorm=True, params_dtype=dtype, pipeline_dtype=dtype, attention_dropout=0.0,
        hidden_dropout=0.0, masked_softmax_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
        bias_dropout_fusion=False, bias_activation_fusion=False,
    )  # fmt: skip
    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    adapt_megatron()
    return GPTModel(
        config, spec, vocab_size=vocabulary, max_sequence_length=4096, position_embedding_type="rope",
        parallel_output=True,
    )  # fmt: skip


def packed_logits(model: GPTModel, sequences: list[list[int]]) -> list[Tensor]:
    """The logits of each sequence, [tokens, vocabulary], each computed for itself in one pack."""
    lengths = [len(sequence) for sequence in sequences]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    pack = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )  # fmt: skip
    ids = torch.tensor([token for sequence in sequences for token in sequence])[None]
    logits = model(input_ids=ids, position_ids=None, attention_mask=None, packed_seq_params=pack)
    return list(logits[0].split(lengths))
