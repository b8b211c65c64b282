"""Keeps what a model computes as it is built, where vLLM draws random weights for it.

verl's engines start with random weights (`load_format: dummy`) until they load a version. vLLM draws them for the whole
state of a model, buffers included. A version has the trainer's weights; what is computed from the model's config alone,
such as the mean by which Qwen's vision models normalize pixels, is not among them and would stay random for ever.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

KEPT = "keeps_computed_buffers"  # attribute of the replaced method


def keep_computed_buffers() -> None:
    """In this process vLLM draws random weights for parameters alone; called before a model is loaded."""
    draw = DummyModelLoader.load_weights
    if hasattr(draw, KEPT):
        return

    @wraps(draw)
    def load_weights(self: DummyModelLoader, model: torch.nn.Module, model_config: Any) -> None:
        on_device = (buffer for buffer in model.buffers() if not buffer.is_meta)  # the others have no values yet
        computed = [(buffer, buffer.clone()) for buffer in on_device]
        draw(self, model, model_config)
        with torch.no_grad():
            for buffer, value in computed:
                buffer.copy_(value)

    setattr(load_weights, KEPT, True)
    DummyModelLoader.load_weights = load_weights
