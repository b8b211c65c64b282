"""A real engine of two shards whose memory is changed behind its back: each fault is named, and loaded over."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vllm_engine import Engine, largest_error, no_generation, redrawn, started

from seamless_verl.replica.worker_extension import check_replies, extension_name
from seamless_verl.weights.seal import EVERY
from seamless_verl.weights.staging import StagingMemory

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),  # as in test_loading.py
    pytest.mark.slowest(4),
]
PROMPTS = [[1, 2, 3, 4, 5], [10, 20, 30], [7] * 12, [100, 90, 80, 70]]
CLOSE = 1e-3
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def engine(nano: Path) -> Iterator[Engine]:
    options = {"tensor_parallel_size": 2, "worker_extension_cls": extension_name()}
    cores = sorted(os.sched_getaffinity(0))
    with started(nano / "model", cores=cores, devices=range(2), **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def loaded(nano: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)


@pytest.fixture(scope="module")
def memory() -> StagingMemory:
    memory = StagingMemory("here")
    memory.seal = "sample"
    return memory


def stage(memory: StagingMemory, version: int, weights: Weights) -> bytes:
    memory.begin()
    for name, weight in weights.items():
        memory.add(name, weight)
    return pickle.dumps([memory.end(version)])


async def call(engine: Engine, method: Any, *args: Any) -> Any:
    return check_replies(await engine.llm.collective_rpc(method, args=args))


async def load(engine: Engine, version: int, staged: bytes) -> None:
    await call(engine, "map_staged", staged)
    async with no_generation(engine, "keep"):
        await call(engine, "load_staged", version, 16 << 20)
        await engine.llm.reset_prefix_cache()


def load_until_found(engine: Engine, memory: StagingMemory, model: Any, begin: int) -> str:
    """What is found within as many versions as all weights take."""
    for version in range(begin, begin + EVERY):
        try:
            engine.run(load(engine, version, stage(memory, version, redrawn(model, seed=version)[1])))
        except Exception as error:
            return str(error)
    raise AssertionError("nothing was found")


def test_a_tensor_that_is_not_sent_and_then_is(engine: Engine, memory: StagingMemory, loaded: Any) -> None:
    renewed, weights = redrawn(loaded, seed=1)
    lacking = {name: weight for name, weight in weights.items() if "layers.1.mlp.up_proj" not in name}
    for _ in range(2):
        with pytest.raises(
            Exception, match=r"SealError: version 1, shard 0: model.layers.1.mlp.gate_up_proj.weight: the"
        ):
            engine.run(load(engine, 1, stage(memory, 1, lacking)))
    for version in range(2, 8):
        engine.run(load(engine, version, stage(memory, version, weights)))
    assert largest_error(renewed, engine.run(engine.samples(PROMPTS, 48))) < CLOSE


def test_a_stale_layer(engine: Engine, memory: StagingMemory, loaded: Any) -> None:
    def leave_out(worker: Any) -> None:
        plan = worker.plan_cache.plan
        plan.steps[:] = [step for step in plan.steps if "layers.1.mlp.down_proj" not in getattr(step, "name", "")]

    engine.run(call(engine, leave_out))
    found = load_until_found(engine, memory, loaded, 10)
    assert "shard 1: model.layers.1.mlp.down_proj.weight (from weight model.layers.1.mlp.down_proj.weight)" in found
    renewed, weights = redrawn(loaded, seed=3)
    engine.run(load(engine, 20, stage(memory, 20, weights)))
    assert largest_error(renewed, engine.run(engine.samples(PROMPTS, 16))) < CLOSE, "the next load did not repair it"


def test_a_flipped_byte_in_the_staged_file(engine: Engine, memory: StagingMemory, loaded: Any) -> None:
    memory.seal = "full"
    staged = stage(memory, 30, dict(loaded.named_parameters()))
    (weights,) = pickle.loads(staged)
    place = next(one for one in weights.placed if "layers.1.self_attn.o_proj" in one.name)
    assert memory.file is not None
    was = os.pread(memory.file, 1, place.offset + 7)[0]
    os.pwrite(memory.file, bytes([was ^ 1]), place.offset + 7)
    with pytest.raises(Exception, match=rf"version 30, shard \d: the staged memory: block 0 of \d+ of {place.name}"):
        engine.run(load(engine, 30, staged))
    with pytest.raises(Exception, match="version 30 is not mapped"):
        engine.run(call(engine, "load_staged", 30, 16 << 20))
    os.pwrite(memory.file, bytes([was]), place.offset + 7)
    engine.run(load(engine, 30, staged))
    memory.seal = "sample"


def test_a_wrong_version_number(engine: Engine, memory: StagingMemory, loaded: Any) -> None:
    engine.run(call(engine, "map_staged", stage(memory, 31, dict(loaded.named_parameters()))))
    with pytest.raises(Exception, match="version 32 is to be loaded, 31 is mapped"):
        engine.run(call(engine, "load_staged", 32, 16 << 20))
    engine.run(call(engine, "load_staged", 31, 16 << 20))


def test_weights_that_change_while_the_cache_is_away(engine: Engine, memory: StagingMemory, loaded: Any) -> None:
    def overwrite(worker: Any) -> None:
        if worker.rank == 1:
            worker.model_runner.model.model.layers[0].mlp.down_proj.weight.data.zero_()

    async def away(change: Any) -> None:
        async with no_generation(engine, "abort"):
            await call(engine, "put_cache_away")
            await call(engine, change)
            await call(engine, "take_cache_back")

    staged = stage(memory, 40, dict(loaded.named_parameters()))
    engine.run(load(engine, 40, staged))
    engine.run(away(lambda worker: None))
    with pytest.raises(
        Exception, match=r"version 40, shard 1: model.layers.0.mlp.down_proj.weight: changed while memory was away"
    ):
        engine.run(away(overwrite))
    engine.run(load(engine, 40, staged))
    assert largest_error(loaded, engine.run(engine.samples(PROMPTS, 16))) < CLOSE


def test_weights_in_doubt_are_compared_whole_while_they_are_staged(
    engine: Engine, memory: StagingMemory, loaded: Any
) -> None:
    staged = stage(memory, 50, dict(loaded.named_parameters()))
    engine.run(load(engine, 50, staged))
    assert engine.run(call(engine, "verify_weights", staged)) == [True, True]

    def overwrite(worker: Any) -> None:
        if worker.rank == 1:
            worker.model_runner.model.model.layers[0].mlp.down_proj.weight.data[-1, -1] += 1

    engine.run(call(engine, overwrite))
    with pytest.raises(Exception, match=r"SealError: version 50, shard 1: model.layers.0.mlp.down_proj.weight \(from"):
        engine.run(call(engine, "verify_weights", staged))
    stage(memory, 51, dict(loaded.named_parameters()))
    with pytest.raises(Exception, match="is not version 50 any more"):
        engine.run(call(engine, "verify_weights", staged))
