"""Staging and loading of models from 0.6B to 8B: GB a second from the device to the host's memory, and back."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import psutil

from gpu.engine import engine_of, load
from gpu.place import SHAPES, Place, Shape, hf_fields
from seamless_verl.weights.staging import StagingMemory

SMALL = Shape(256, 4, 8, 704)  # on the CPU
TIMES = 3


def check(place: Place) -> None:
    """Each size that the card and the host have memory for, three loads each: the first one makes the load plan."""
    for name, shape in (SHAPES if place.cuda else {"small": SMALL}).items():
        if (reason := no_room(place, shape)) is not None:
            place.report(name, not_run=reason)
            continue
        model = write_config(place.folder / name, shape)
        weights = random_weights(place, model)
        options = {"model": str(model), "load_format": "dummy", "max_num_seqs": 8}
        if place.cuda:
            options["gpu_memory_utilization"] = 0.4
        memory = StagingMemory("here")
        with engine_of(place, **options) as engine:
            for turn in range(1, TIMES + 1):
                place.report(f"{name}_{turn}", **engine.run(load(engine, weights, memory, version=turn)))
        memory.close()
        weights.clear()
        free(place)


def no_room(place: Place, shape: Shape) -> str | None:
    """The weights are there twice on the device, the engine's in its share of 0.4, and twice on the host."""
    size = 2 * shape.parameters
    host = psutil.virtual_memory().available
    if 2.5 * size > host:
        return f"needs {2.5 * size / 1e9:.0f} GB of the host, which has {host / 1e9:.0f} GB"
    if not place.cuda:
        return None
    import torch

    free_bytes, total = torch.cuda.mem_get_info()
    if 1.2 * size > 0.4 * total or size > free_bytes - 0.4 * total:
        return f"needs {3 * size / 1e9:.0f} GB of the card, which has {total / 1e9:.0f} GB"
    return None


def write_config(folder: Path, shape: Shape) -> Path:
    """A model's folder without weights; an engine makes its own."""
    from transformers import Qwen3Config

    Qwen3Config(**hf_fields(shape), architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["num_hidden_layers"] == shape.layers
    return folder


def random_weights(place: Place, model: Path) -> dict[str, Any]:
    """bf16 weights with transformers' names, on the device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    device, dtype = ("cuda", torch.bfloat16) if place.cuda else ("cpu", torch.float32)
    return {
        name: torch.randn(weight.shape, device=device, dtype=dtype).mul_(0.02)
        for name, weight in shapes.named_parameters()
    }


def free(place: Place) -> None:
    import torch

    gc.collect()
    if place.cuda:
        torch.cuda.empty_cache()
