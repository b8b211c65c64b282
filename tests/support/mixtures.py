"""Mixtures of experts of other kinds, with sizes and tokenizer of the tiny one; `moe` is the folder of that one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, Glm4MoeConfig, MixtralConfig, PretrainedConfig

from seamless_verl.tiny.models import write_weights

SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("initializer_range", "max_position_embeddings", "eos_token_id", "pad_token_id", "num_experts_per_tok"),
)


def make_mixtral(moe: Path, folder: Path) -> Path:
    """Writes a Mixtral to `folder`, which is returned."""
    shape, sizes = sizes_of(moe)
    config = MixtralConfig(
        **sizes, intermediate_size=shape.moe_intermediate_size, num_local_experts=shape.num_experts,
        rope_theta=10000.0, tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    return written(config, moe, folder)


def make_glm(moe: Path, folder: Path) -> Path:
    """Writes a GLM 4.5 to `folder`, which is returned: a dense layer first, then an expert that all tokens pass beside
    those that each token's sigmoid scores choose, corrected by a bias that no gradient changes. Its tokenizer has the
    token before a tool's answer for which verl's loops ask it; engines leave out ids that a tokenizer has not."""
    shape, sizes = sizes_of(moe)
    config = Glm4MoeConfig(
        **sizes | {"num_hidden_layers": 3, "vocab_size": sizes["vocab_size"] + 1},
        first_k_dense_replace=1, intermediate_size=2 * shape.hidden_size,
        moe_intermediate_size=shape.moe_intermediate_size, n_routed_experts=shape.num_experts, n_shared_experts=1,
        n_group=1, topk_group=1, use_qk_norm=True, attention_bias=True, partial_rotary_factor=0.5,
        tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    return written(config, moe, folder, "<|observation|>")


def sizes_of(moe: Path) -> tuple[PretrainedConfig, dict[str, Any]]:
    shape = AutoConfig.from_pretrained(moe)
    return shape, {name: getattr(shape, name) for name in SIZES}


def written(config: PretrainedConfig, moe: Path, folder: Path, *more_tokens: str) -> Path:
    write_weights(config, 0, folder)
    tokenizer = AutoTokenizer.from_pretrained(moe)
    tokenizer.add_tokens(list(more_tokens), special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder
