"""Weights of a mixture of experts, loaded from the host's memory into an engine that generates."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.mixtures import make_mixtral
from support.vllm_engine import Engine, largest_error, no_generation, redrawn, started

from seamless_verl.replica.worker_extension import check_replies, extension_name
from seamless_verl.weights.staging import StagingMemory

pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]
PROMPTS = [[1, 2, 3, 4, 5], [10, 20, 30], [7] * 12, [100, 90, 80, 70]]
CLOSE, FAR = 1e-3, 0.1


@pytest.fixture(scope="module", params=["moe", "mixtral"])
def model(moe: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    qwen = moe / "model"
    return qwen if request.param == "moe" else make_mixtral(qwen, tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with started(
        model, cores=sorted(os.sched_getaffinity(0)), devices=[0], worker_extension_cls=extension_name()
    ) as it:
        yield it


async def load(engine: Engine, memory: StagingMemory, weights: Mapping[str, torch.Tensor], version: int) -> list[bool]:
    """Whether each worker has a load plan after it."""
    memory.seal = "sample"
    memory.begin()
    for name, weight in weights.items():
        memory.add(name, weight)
    check_replies(await engine.llm.collective_rpc("map_staged", args=(pickle.dumps([memory.end(version)]),)))
    async with no_generation(engine, "keep"):
        check_replies(await engine.llm.collective_rpc("load_staged", args=(version, 16 << 20)))
        await engine.llm.reset_prefix_cache()
    planned: list[bool] = await engine.llm.collective_rpc(lambda worker: worker.plan_cache.plan is not None)
    return planned


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Under the names of a checkpoint, which bridges give: of transformers' modules all experts are one weight."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_every_load_takes_effect_exactly_and_later_ones_by_the_plan(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert largest_error(loaded, engine.run(engine.samples(PROMPTS, 48))) < CLOSE
    memory = StagingMemory("here")
    for version in (1, 2, 3):
        renewed, _ = redrawn(loaded, seed=version)
        assert all(engine.run(load(engine, memory, saved(renewed, tmp_path), version)))
        samples = engine.run(engine.samples(PROMPTS, 48))
        assert largest_error(renewed, samples) < CLOSE
        assert largest_error(loaded, samples) > FAR, "the old weights would not have been distinguished"
