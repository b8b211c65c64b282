"""The rollout engine on the host: exact logprobs, weights loaded in place, its own core, harmless sleep."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vllm_engine import Engine, Sample, allowed_cores, largest_error, no_generation, processes, redrawn, started

pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]

PROMPTS = [[1, 2, 3, 4, 5], [10, 20, 30], [7] * 12, [100, 90, 80, 70]]
CLOSE, FAR = 1e-3, 0.1
USABLE = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def engine(nano: Path) -> Iterator[Engine]:
    with started(nano / "model", cores=USABLE, devices=[len(USABLE) - 1]) as engine:
        engine.first = engine.run(engine.samples(PROMPTS, 48))
        yield engine


@pytest.fixture(scope="module")
def loaded(nano: Path) -> Any:
    """Transformers' reading of what the engine starts with."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)


def test_sampled_logprobs_are_those_of_transformers(engine: Engine, loaded: Any) -> None:
    assert largest_error(loaded, engine.first) < CLOSE


@pytest.mark.parametrize("bucket_mb", [16, 1])
def test_an_update_takes_effect_exactly(engine: Engine, loaded: Any, bucket_mb: int) -> None:
    renewed, weights = redrawn(loaded, seed=bucket_mb)
    size = sum(weight.nbytes for weight in weights.values())
    assert (size > 1 << 20) and (size < 16 << 20), "one bucket of 16 MiB, several of 1"
    engine.run(engine.update(weights, bucket_mb))
    samples = engine.run(engine.samples(PROMPTS, 48))
    assert largest_error(renewed, samples) < CLOSE
    assert largest_error(loaded, samples) > FAR, "the test could not distinguish the old weights"


@pytest.mark.parametrize("only", ["layers.1.mlp.down_proj", "layers.0.self_attn.k_proj", "lm_head", "embed_tokens"])
def test_part_of_the_weights_can_be_updated(engine: Engine, loaded: Any, only: str) -> None:
    engine.run(engine.update(dict(loaded.named_parameters()), bucket_mb=16))
    renewed, weights = redrawn(loaded, seed=3, only=only)
    assert len(weights) == 1
    engine.run(engine.update(weights, bucket_mb=16))
    samples = engine.run(engine.samples(PROMPTS, 48))
    assert largest_error(renewed, samples) < CLOSE
    assert largest_error(loaded, samples) > 10 * CLOSE, "the part would not have been missed"


def test_a_hundred_updates_leak_no_memory(engine: Engine, loaded: Any) -> None:
    weights = dict(loaded.named_parameters())
    (core,) = processes("EngineCore")
    for _ in range(10):
        engine.run(engine.update(weights, bucket_mb=16))
    before = core.memory_info().rss
    for _ in range(100):
        engine.run(engine.update(weights, bucket_mb=16))
    leaked_once = sum(weight.nbytes for weight in weights.values())
    assert core.memory_info().rss - before < 10 * leaked_once


def test_abort_returns_partial_tokens_with_their_logprobs(engine: Engine, loaded: Any) -> None:
    engine.run(engine.update(dict(loaded.named_parameters()), bucket_mb=16))
    samples = engine.run(cut_short(engine))
    assert {sample.finish for sample in samples} == {"abort"}
    assert all(8 <= len(sample.tokens) < 900 for sample in samples)
    assert largest_error(loaded, samples) < CLOSE
    assert engine.run(engine.sample(PROMPTS[0], 8)).finish == "length"


async def cut_short(engine: Engine) -> list[Sample]:
    """Start requests too long to end by themselves; abort them once each has 8 tokens."""
    begun = [asyncio.Event() for _ in PROMPTS]

    async def follow(prompt: list[int], under_way: asyncio.Event) -> Sample:
        async for last in engine.stream(prompt, 900):
            if len(last.tokens) >= 8:
                under_way.set()
        return last

    following = [asyncio.create_task(follow(*pair)) for pair in zip(PROMPTS, begun, strict=True)]
    await asyncio.gather(*(event.wait() for event in begun))
    async with no_generation(engine, "abort"):
        return await asyncio.gather(*following)


def test_sleep_and_wake_lose_nothing(engine: Engine, loaded: Any) -> None:
    async def nap() -> None:
        await engine.llm.sleep(level=2)
        await engine.llm.wake_up()

    engine.run(engine.update(dict(loaded.named_parameters()), bucket_mb=16))
    engine.run(nap())
    assert largest_error(loaded, engine.run(engine.samples(PROMPTS, 16))) < CLOSE


def test_one_device_is_one_process_on_its_core(engine: Engine) -> None:
    (core,) = processes("EngineCore")
    assert not processes("VLLM::Worker")
    assert allowed_cores(core) == {USABLE[-1]}
    assert engine.run(engine.torch_threads()) == [1]
    assert os.sched_getaffinity(0) == set(USABLE), "the front end is not pinned"


def test_without_the_adaptation_a_packed_weight_is_gone(engine: Engine) -> None:
    from seamless_verl.platform.adaptation import KEEP_WEIGHTS

    pack: Any = KEEP_WEIGHTS.verify()
    kept, dropped = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    for layer, packing in ((kept, pack), (dropped, pack.__wrapped__)):
        layer.requires_grad_(False)
        packing(layer, remove_weight=True)
    assert kept.weight.shape == (64, 64)
    assert dropped.weight.numel() == 0


def test_packed_copies_that_were_given_back_are_made_again_when_used(engine: Engine) -> None:
    from vllm.model_executor.layers.utils import cpu_unquantized_gemm

    from seamless_verl.platform.adaptation import KEEP_WEIGHTS
    from seamless_verl.platform.vllm.weights import MULTIPLY, UNPACKED, free_packed_weights

    pack: Any = KEEP_WEIGHTS.verify()
    packed, plain = (torch.nn.Linear(64, 64, bias=False).requires_grad_(False) for _ in range(2))
    pack(packed, remove_weight=True)
    setattr(plain, MULTIPLY, UNPACKED)
    free_packed_weights(torch.nn.ModuleList([packed, plain, torch.nn.Linear(2, 2)]))
    assert getattr(plain, MULTIPLY) is UNPACKED
    packed.weight.copy_(plain.weight)
    x = torch.randn(3, 64)
    for _ in range(2):
        product = cpu_unquantized_gemm(packed, x, packed.weight, None)
        torch.testing.assert_close(product, x @ plain.weight.T)
