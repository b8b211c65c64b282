"""Weights that are drawn from the number of their version, so that whoever knows the number can check a logprob."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from support.vllm_engine import redrawn


class Weights:
    """The weights of every version, drawn from its number: version 0 is the model as it is."""

    def __init__(self, model: Path) -> None:
        self.first = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)

    def model(self, version: int) -> Any:
        return redrawn(self.first, version)[0] if version else self.first

    def of(self, version: int) -> dict[str, torch.Tensor]:
        return dict(self.model(version).named_parameters())
