"""Counts the sizes of a language model from its Hugging Face config.

Counts of parameters are exact for COUNTED kinds (compared with transformers' own modules by a test); other
kinds are counted as a decoder with gated MLPs, which most of them are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Kinds whose count is exact, and of them those with biases on q, k and v by default, and with norms of q and k.
COUNTED = ("deepseek_v3", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
QKV_BIAS = ("qwen2", "qwen2_moe")
QK_NORM = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ModelFacts:
    """Parameters by where they lie, in elements; widths of activations, in elements a token.

    attention, dense_mlp, shared and experts count one layer's (all experts together); `replicated` and
    `router` are not divided among tensor-parallel ranks; `head` is 0 where it is the embedding.
    """

    kind: str
    exact: bool
    hidden: int
    vocabulary: int
    dense_layers: int
    moe_layers: int
    attention: int
    replicated: int
    dense_mlp: int
    router: int
    shared: int
    experts: int
    embedding: int
    head: int
    qkv_width: int
    """query, key and value of one token"""
    mlp_width: int
    """inner width of the MLPs that one token passes in a layer, the widest kind of layer"""
    cache_width: int
    """what the KV cache keeps of one token in a layer"""
    cache_heads: int
    """key-value heads, among which tensor-parallel ranks divide the cache"""

    @property
    def layers(self) -> int:
        return self.dense_layers + self.moe_layers

    @property
    def parameters(self) -> int:
        """All of them, shared ones once."""
        every = self.layers * (self.attention + self.replicated)
        mlps = self.dense_layers * self.dense_mlp + self.moe_layers * (self.router + self.shared + self.experts)
        return self.embedding + self.head + self.hidden + every + mlps

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ModelFacts | None:
        """From a config as config.json has it; None when it leaves sizes to defaults that are not known here."""
        text = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
        needed = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        if any(not isinstance(text.get(name), int) or text[name] < 1 for name in needed):
            return None
        kind = str(text.get("model_type", config.get("model_type", "")))
        attention, replicated, qkv, cache, heads = (
            _latent_attention(text) if text.get("kv_lora_rank") else _attention(text, kind)
        )
        moe = _mixture(text, kind)
        hidden, vocabulary = text["hidden_size"], text["vocab_size"]
        tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
        active = moe.active if moe.layers == text["num_hidden_layers"] else max(text["intermediate_size"], moe.active)
        return cls(
            kind=kind,
            exact=kind in COUNTED and text is config,
            hidden=hidden,
            vocabulary=vocabulary,
            dense_layers=text["num_hidden_layers"] - moe.layers,
            moe_layers=moe.layers,
            attention=attention,
            replicated=replicated + 2 * hidden,  # the layer's two norms
            dense_mlp=3 * hidden * text["intermediate_size"],
            router=moe.router,
            shared=moe.shared,
            experts=moe.experts,
            embedding=vocabulary * hidden,
            head=0 if tied else vocabulary * hidden,
            qkv_width=qkv,
            mlp_width=active,
            cache_width=cache,
            cache_heads=heads,
        )


@dataclass(frozen=True)
class _Experts:
    layers: int = 0
    router: int = 0
    shared: int = 0
    experts: int = 0
    active: int = 0


def _attention(text: Mapping[str, Any], kind: str) -> tuple[int, int, int, int, int]:
    """Attention with heads: parameters divided among ranks and not, widths of qkv and cache, heads of the cache."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    groups = text.get("num_key_value_heads") or heads
    size = text.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
    width, cache = (heads + 2 * groups) * size, 2 * groups * size
    matrices = hidden * width + heads * size * hidden
    biases = width if kind in QKV_BIAS or text.get("attention_bias") else 0
    biases += hidden if text.get("attention_bias") and kind not in QKV_BIAS else 0
    return matrices + biases, 2 * size if kind in QK_NORM else 0, width, cache, groups


def _latent_attention(text: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """The same for latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), whose cache is not divided."""
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    rank, rope, nope = text["kv_lora_rank"], text.get("qk_rope_head_dim", 64), text.get("qk_nope_head_dim", 128)
    value, query_rank = text.get("v_head_dim", 128), text.get("q_lora_rank", 1536)
    query = heads * (nope + rope)
    queries = hidden * query_rank + query_rank * query if query_rank else hidden * query
    matrices = queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    width = 2 * query + heads * value
    return matrices, rank + (query_rank or 0), width, rank + rope, 1


def _mixture(text: Mapping[str, Any], kind: str) -> _Experts:
    count = next((text[name] for name in EXPERT_COUNTS if text.get(name)), 0)
    if not count:
        return _Experts()
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    inner = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * inner
    active = (text.get("num_experts_per_tok") or 1) * inner + shared
    gate = hidden if kind == "qwen2_moe" else 0  # the shared expert's own
    return _Experts(
        layers=sum(_is_sparse(text, layer) for layer in range(layers)),
        router=count * hidden + gate,
        shared=3 * hidden * shared,
        experts=count * 3 * hidden * inner,
        active=active,
    )


def _is_sparse(text: Mapping[str, Any], layer: int) -> bool:
    if layer < (text.get("first_k_dense_replace") or 0) or layer in (text.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (text.get("decoder_sparse_step") or 1) == 0


EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
