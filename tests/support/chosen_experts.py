"""The experts that transformers chooses in the tiny mixture."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

LAYERS, CHOSEN = 2, 2


def chosen_experts(model: Any, ids: list[int]) -> list[list[set[int]]]:
    """By position and layer, the experts that transformers' model chooses."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    tops = [layer.reshape(len(ids), -1).topk(CHOSEN).indices.tolist() for layer in logits]
    return [[set(layer[position]) for layer in tops] for position in range(len(ids))]


def as_sets(rows: Any) -> list[list[set[int]]]:
    """The same of rows [N, layers, experts]."""
    return [[set(np.asarray(layer).tolist()) for layer in row] for row in rows]
