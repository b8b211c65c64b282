"""Where a check runs: the card, or the CPU platform, on which the same checks run small; and what they report."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

CUDA, CPU = "cuda", "cpu"


class SkippedError(Exception):
    """The check cannot run here; its text is the reason in the result file."""


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model's sizes; heads of 128, 8 key-value heads (nano: 32 and 2)."""

    hidden: int
    layers: int
    heads: int
    mlp: int
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Without norms, of a vocabulary of VOCABULARY tokens."""
        attention = self.hidden * 128 * (2 * self.heads + 2 * 8)
        ends = VOCABULARY * self.hidden * (1 if self.tied else 2)
        return ends + self.layers * (attention + 3 * self.hidden * self.mlp)


VOCABULARY = 151936
SHAPES = {  # the published Qwen3 configs
    "0.6B": Shape(1024, 28, 16, 3072, tied=True),
    "1.7B": Shape(2048, 28, 16, 6144, tied=True),
    "4B": Shape(2560, 36, 32, 9728, tied=True),
    "8B": Shape(4096, 36, 32, 12288),
}


@dataclass(frozen=True)
class Place:
    """`folder` is the check's own, removed after it; `lines` takes what it reports."""

    platform: str
    folder: Path
    lines: Path

    @property
    def cuda(self) -> bool:
        return self.platform == CUDA

    @property
    def shared(self) -> Path:
        """The folder of all checks of one runner, which removes it."""
        return self.lines.parent

    def report(self, name: str, **figures: Any) -> None:
        """Figures of one part of the check; written at once, so that a check that is cut leaves them."""
        with self.lines.open("a") as file:
            file.write(json.dumps({name: figures}) + "\n")

    @cached_property
    def model(self) -> Path:
        """A model of random weights with the tiny tokenizer: 0.4B in bf16 on the card (0.6B's layers), nano else.

        All checks of a runner share it, and with its path what vLLM has compiled for it.
        """
        from seamless_verl.tiny import make_model
        from seamless_verl.tiny.models import model_config
        from seamless_verl.tiny.tokenizer import make_tokenizer

        path = self.shared / "model"
        if not self.cuda:
            return make_model("nano", 0, path)
        if (path / "tokenizer.json").exists():
            return path
        import torch
        from transformers import Qwen3ForCausalLM

        shape, config = SHAPES["0.6B"], model_config("nano")
        config.update(hf_fields(shape) | {"vocab_size": config.vocab_size, "tie_word_embeddings": False})
        torch.manual_seed(0)
        with torch.device(CUDA):
            made = Qwen3ForCausalLM(config).to(torch.bfloat16)
        # A zero embedding under a norm would make gradients of a policy that generates the padding token explode.
        torch.nn.init.normal_(
            made.get_input_embeddings().weight.data[config.pad_token_id], std=config.initializer_range
        )
        made.save_pretrained(path)
        make_tokenizer().save_pretrained(path)
        del made
        torch.cuda.empty_cache()
        return path

    def environment(self) -> dict[str, str]:
        """Variables of the processes that a check starts."""
        common = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_NO_USAGE_STATS": "1"}
        if self.cuda:  # the kit carries no flashinfer; what is compiled is kept for the next check
            caches = {
                "VLLM_DISABLE_COMPILE_CACHE": "0",
                "VLLM_CACHE_ROOT": str(self.shared / "vllm"),
                "TORCHINDUCTOR_CACHE_DIR": str(self.shared / "inductor"),
                "TRITON_CACHE_DIR": str(self.shared / "triton"),
            }
            return {**common, **caches, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        pinned = {"SEAMLESS_CPU_CORES": cores, "SEAMLESS_VISIBLE_DEVICES": "0"}
        return {**common, **pinned, "VERL_PLATFORM": "cpu", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


def hf_fields(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": shape.mlp,
        "tie_word_embeddings": shape.tied,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.02,
        "dtype": "bfloat16",
    }
