"""Makes Qwen3-style causal language models with random weights from a seed, in about a second.

Shapes divide by two wherever tensor or pipeline parallelism of two cuts (heads, key-value heads, layers,
vocabulary), and head sizes are ones that vLLM's CPU attention has kernels for (32 and up).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from seamless_verl.errors import ConfigError
from seamless_verl.runtime.files import write_atomically
from seamless_verl.tiny.files import replaced_folder
from seamless_verl.tiny.tokenizer import CHAT_TEMPLATE, END_OF_TURN, PAD, VOCAB_SIZE, make_tokenizer, token_id

if TYPE_CHECKING:
    from transformers import PretrainedConfig, Qwen3Config, Qwen3MoeConfig

MAX_POSITIONS = 8192
"""Longest sequence, in tokens, where no other is asked for. The weights are the same for any: RoPE has none."""

MADE = "made.json"
"""In the folder of a model that need not be made again: the size, seed, positions and code that it was made with."""

WEIGHT_GAIN, HEAD_STD = 0.9, 0.02
"""Scales of the random weights. A weak head makes sampling start nearly uniform, whatever the seed. Stronger
layers learn faster from reward alone (the prompt reaches the last position sooner), but are less
exact in bf16: at 2.25 the probabilities' correlation with float32 falls below 0.9999 when split in two."""


@dataclass(frozen=True)
class ModelSize:
    """One row of the table of sizes; `heads` and `kv_heads` count attention heads of `head_dim` each."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    experts: int = 0
    """MLPs of a layer, of which each token passes two; 0: one, which all tokens pass"""

    @property
    def weight_std(self) -> float:
        """Standard deviation of all initial weights but the head's."""
        return round(WEIGHT_GAIN / math.sqrt(self.hidden), 4)


SIZES = {
    "nano": ModelSize(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=256),
    "small": ModelSize(hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32, mlp=704),
    "medium": ModelSize(hidden=512, layers=6, heads=8, kv_heads=4, head_dim=64, mlp=1536),
    "moe": ModelSize(hidden=128, layers=2, heads=4, kv_heads=2, head_dim=32, mlp=64, experts=8),
}
"""About 0.4, 3.1, 19.3 and 0.6 million parameters; the last is a mixture of experts."""


def size_named(size: str) -> ModelSize:
    """The row of `SIZES`; ConfigError for an unknown name."""
    if size not in SIZES:
        raise ConfigError("size", size, "no such model size", f"Choose one of {', '.join(SIZES)}")
    return SIZES[size]


def check_positions(positions: int) -> None:
    """ConfigError for a longest sequence of no token."""
    if positions < 1:
        raise ConfigError("positions", positions, "no sequence is so short", "Give 1 or more")


def model_config(size: str, positions: int = MAX_POSITIONS) -> Qwen3Config | Qwen3MoeConfig:
    """The Hugging Face config of a size (untied embeddings, so that pipeline stages share no weight)."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    shape = size_named(size)
    # The weights of a token's two experts sum to one, as in Qwen's own mixtures.
    mixture = dict(
        num_experts=shape.experts, num_experts_per_tok=2, moe_intermediate_size=shape.mlp, norm_topk_prob=True
    )
    return (Qwen3MoeConfig if shape.experts else Qwen3Config)(
        **(mixture if shape.experts else {}),
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        initializer_range=shape.weight_std,
        max_position_embeddings=positions,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        eos_token_id=token_id(END_OF_TURN),
        pad_token_id=token_id(PAD),
        dtype="float32",
    )


def make_model(size: str, seed: int, path: str | Path, positions: int = MAX_POSITIONS) -> Path:
    """Writes a model and its tokenizer to the folder `path`, and replaces a model in it.

    The files (config, generation config, float32 safetensors, tokenizer) depend on `size`, `seed` and
    `positions`, the longest sequence in tokens, alone, byte for byte. Returns the folder. ConfigError for an
    unknown size, less than one position, or when `path` holds something other than a model.
    """
    check_positions(positions)
    size_named(size)  # a mistake is refused before torch and transformers are imported, which takes seconds
    with replaced_folder(Path(path), marker="config.json") as folder:
        write_weights(model_config(size, positions), seed, folder)
        make_tokenizer().save_pretrained(folder)
    return Path(path)


def keep_or_make_model(size: str, seed: int, path: str | Path, positions: int = MAX_POSITIONS) -> Path:
    """`make_model`, unless `path` has the same one already: making it takes seconds, most of them imports."""
    made = Path(path) / MADE
    wanted = {"size": size, "seed": seed, "positions": positions, "code": code_digest()}
    if not made.is_file() or json.loads(made.read_text(encoding="utf-8")) != wanted:
        make_model(size, seed, path, positions)
        write_atomically(made, json.dumps(wanted))
    return Path(path)


def code_digest() -> str:
    """A digest of this package's code; it changes when the files of a model would."""
    sources = (Path(__file__), Path(__file__).with_name("tokenizer.py"), CHAT_TEMPLATE)
    return sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()


def write_weights(config: PretrainedConfig, seed: int, folder: Path) -> None:
    """Writes a model of this config with random weights to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        torch.nn.init.normal_(model.lm_head.weight, std=HEAD_STD)
        # A policy that starts nearly uniform generates the padding token too. Its embedding is made zero, and the
        # gradient of an RMSNorm at zero is 1 / sqrt(eps), a thousand times that of any other token.
        padding = model.get_input_embeddings().weight.data[config.pad_token_id]
        torch.nn.init.normal_(padding, std=config.initializer_range)
    model.generation_config = GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True
    )
    model.save_pretrained(folder)
