"""An engine of several shards whose adapter is replaced in place, between two of its steps: its tokens are those of the
merged model. Half an adapter is named in the commit in which it appears."""

from __future__ import annotations

import copy
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hosts import VLLM
from support.vllm_engine import Engine, largest_error, no_generation, started

from seamless_verl.replica.worker_extension import check_replies, extension_name
from seamless_verl.weights.seal import EVERY
from seamless_verl.weights.staging import StagingMemory

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),  # as in test_loading.py
]
PROMPTS = [[1, 2, 3, 4, 5], [10, 20, 30], [7] * 12, [100, 90, 80, 70]]
RANK, ALPHA = 8, 16
CLOSE, FAR = 1e-4, 0.05
SHARDS = 1 if VLLM == "0.24" else 2  # on the CPU 0.24 computes no adapters of two shards


@pytest.fixture(scope="module")
def engine(nano: Path) -> Iterator[Engine]:
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 2 * RANK, "worker_extension_cls": extension_name()}
    cores = sorted(os.sched_getaffinity(0))
    with started(nano / "model", cores=cores, devices=range(SHARDS), tensor_parallel_size=SHARDS, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def memory() -> StagingMemory:
    memory = StagingMemory("here")
    memory.seal = "sample"
    return memory


@pytest.fixture(scope="module")
def base(nano: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)


def adapted(base: Any, seed: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """The base with a random adapter merged, and the adapter as Megatron-Bridge exports it."""
    generator = torch.Generator().manual_seed(seed)
    merged, adapter = copy.deepcopy(base), dict[str, torch.Tensor]()
    for name, weight in merged.named_parameters():
        if weight.ndim == 2 and ".layers." in name:
            a = 0.1 * torch.randn(RANK, weight.shape[1], generator=generator)
            b = 0.1 * torch.randn(weight.shape[0], RANK, generator=generator)
            weight.data += ALPHA / RANK * b @ a
            stem = name.removesuffix(".weight")
            adapter |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    return merged, adapter


async def load(engine: Engine, memory: StagingMemory, version: int, adapter: dict[str, torch.Tensor]) -> None:
    from verl.utils.megatron_peft_utils import build_peft_config_for_vllm

    memory.begin()
    for name, weight in adapter.items():
        memory.add(name, weight)
    staged = pickle.dumps([memory.end(version, build_peft_config_for_vllm({"rank": RANK, "alpha": ALPHA}))])
    check_replies(await engine.llm.collective_rpc("map_staged", args=(staged,)))
    async with no_generation(engine, "keep"):
        check_replies(await engine.llm.collective_rpc("load_staged", args=(version, 16 << 20)))
        await engine.llm.reset_prefix_cache()


def lora_request() -> Any:
    from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
    from vllm.lora.request import LoRARequest

    return LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, VLLM_LORA_PATH)


def test_each_adapter_generates_as_the_merged_model_and_the_base_stays(
    engine: Engine, memory: StagingMemory, base: Any
) -> None:
    for version in (1, 2):
        merged, adapter = adapted(base, seed=version)
        engine.run(load(engine, memory, version, adapter))
        engine.lora = lora_request()
        samples = engine.run(engine.samples(PROMPTS, 48))
        error = largest_error(merged, samples)
        print(f"\nlargest difference of logprobs to the merged model: {error:.1e}")  # noqa: T201
        assert error < CLOSE and largest_error(base, samples) > FAR
        engine.lora = None
        assert largest_error(base, engine.run(engine.samples(PROMPTS, 48))) < CLOSE
    assert memory.size < 2 * sum(weight.nbytes for weight in adapter.values())


def refused(engine: Engine, memory: StagingMemory, version: int, adapter: dict[str, torch.Tensor]) -> str:
    with pytest.raises(Exception, match=rf"SealError: version {version}, shard \d: ") as raised:
        engine.run(load(engine, memory, version, adapter))
    return str(raised.value)


def verdict(engine: Engine, memory: StagingMemory, version: int, base: Any) -> str:
    """What a load of the version is refused for, or ""."""
    try:
        engine.run(load(engine, memory, version, adapted(base, seed=version)[1]))
    except Exception as error:
        return str(error)
    return ""


def without(adapter: dict[str, torch.Tensor], *left_out: str) -> dict[str, torch.Tensor]:
    return {name: one for name, one in adapter.items() if not any(part in name for part in left_out)}


@pytest.mark.parametrize(
    ("left_out", "named"),
    [
        (("layers.1.mlp.up_proj",), "model.layers.1.mlp.up_proj: the trainer sent no adapter, or half of one"),
        (("layers.0.self_attn.o_proj.lora_B",), "model.layers.0.self_attn.o_proj: the trainer sent no adapter, or"),
        (("layers.1",), "model.layers.1.self_attn.q_proj, model.layers.1.self_attn.k_proj, .* and 4 more: the trainer"),
    ],
)
def test_half_an_adapter_that_is_sent(
    engine: Engine, memory: StagingMemory, base: Any, left_out: tuple[str, ...], named: str
) -> None:
    _, adapter = adapted(base, seed=3)
    for _ in range(2):  # also when it loads again
        assert re.search(named, refused(engine, memory, 3, without(adapter, *left_out)))


def test_a_tensor_for_which_the_engine_has_no_module(engine: Engine, memory: StagingMemory, base: Any) -> None:
    _, adapter = adapted(base, seed=4)
    renamed = {name.replace("o_proj", "out_proj"): one for name, one in adapter.items()}
    found = refused(engine, memory, 4, renamed)
    assert "model.layers.0.self_attn.out_proj.lora_A.weight" in found and "no module of the engine takes it" in found


@pytest.mark.parametrize("module", ["self_attn.qkv_proj", "mlp.down_proj"])
def test_a_module_that_keeps_the_adapter_of_an_earlier_version(
    engine: Engine, memory: StagingMemory, base: Any, module: str
) -> None:
    """On the last shard alone: found within eight loads, of which each draws other modules, and again until it fits."""
    name = f"model.layers.1.{module}"

    def keep(worker: Any) -> None:
        layer = worker.model_runner.model.lora_manager.modules[name]
        if worker.rank == SHARDS - 1:
            a, b = layer.lora_a_stacked, layer.lora_b_stacked
            layer.lora_a_stacked, layer.lora_b_stacked = (tuple(map(torch.clone, one)) for one in (a, b))
            copied = type(layer).set_lora

            def set_lora(*args: Any) -> None:
                copied(layer, *args)
                for now, was in zip((*layer.lora_a_stacked, *layer.lora_b_stacked), (*a, *b), strict=True):
                    now.copy_(was)

            layer.set_lora = set_lora

    def end(worker: Any) -> None:
        vars(worker.model_runner.model.lora_manager.modules[name]).pop("set_lora", None)

    engine.run(load(engine, memory, 9, adapted(base, seed=9)[1]))
    engine.run(engine.llm.collective_rpc(keep))
    found = {version: verdict(engine, memory, version, base) for version in range(10, 10 + EVERY)}
    version = min(version for version, refusal in found.items() if refusal)
    assert all(found[later] for later in range(version, 10 + EVERY))
    assert f"shard {SHARDS - 1}: {name}.lora_A (from weight model.layers.1." in found[version]
    assert f"not what was staged. What fitted last: version {version - 1}" in found[version]
    assert found[version].count("SealError: ") == 1
    engine.run(engine.llm.collective_rpc(end))
    merged, adapter = adapted(base, seed=18)
    engine.run(load(engine, memory, 18, adapter))
    engine.lora = lora_request()
    assert largest_error(merged, engine.run(engine.samples(PROMPTS, 16))) < CLOSE, "the next load did not repair it"
    engine.lora = None


@pytest.mark.parametrize("of_base", [False, True])
def test_what_changes_while_the_cache_is_away(engine: Engine, memory: StagingMemory, base: Any, of_base: bool) -> None:
    def overwrite(worker: Any) -> None:
        layer = worker.model_runner.model.lora_manager.modules["model.layers.1.mlp.down_proj"]
        changed = layer.base_layer.weight.data if of_base else layer.lora_b_stacked[0]
        worker.kept = changed.clone()
        changed.zero_()

    def restore(worker: Any) -> None:
        layer = worker.model_runner.model.lora_manager.modules["model.layers.1.mlp.down_proj"]
        (layer.base_layer.weight.data if of_base else layer.lora_b_stacked[0]).copy_(worker.kept)

    async def away(change: Any) -> None:
        async with no_generation(engine, "abort"):
            for method in ("put_cache_away", change, "take_cache_back"):
                check_replies(await engine.llm.collective_rpc(method))

    engine.run(load(engine, memory, 20, adapted(base, seed=20)[1]))
    engine.run(away(lambda worker: None))
    with pytest.raises(
        Exception, match=r"version 20, shard \d: model.layers.1.mlp.down_proj\..*: changed while memory"
    ):
        engine.run(away(overwrite))
    engine.run(engine.llm.collective_rpc(restore))
    engine.run(load(engine, memory, 21, adapted(base, seed=21)[1]))


def test_without_a_seal_half_an_adapter_is_loaded(engine: Engine, memory: StagingMemory, base: Any) -> None:
    memory.seal = "off"
    engine.run(load(engine, memory, 30, without(adapted(base, seed=30)[1], "layers.1")))
    memory.seal = "sample"


@pytest.mark.long
def test_two_thousand_adapters_without_a_false_alarm(engine: Engine, memory: StagingMemory, base: Any) -> None:
    """Each has values of its own; from time to time the cache is away between two of them."""
    _, adapter = adapted(base, seed=40)

    async def commits() -> None:
        for version in range(100, 2100):
            scale = 1 + version % 97 / 97
            await load(engine, memory, version, {name: scale * weight for name, weight in adapter.items()})
            if version % 50 == 0:
                async with no_generation(engine, "abort"):
                    for method in ("put_cache_away", "take_cache_back"):
                        check_replies(await engine.llm.collective_rpc(method))

    engine.run(commits())
    merged, adapter = adapted(base, seed=41)
    engine.run(load(engine, memory, 2100, adapter))
    engine.lora = lora_request()
    assert largest_error(merged, engine.run(engine.samples(PROMPTS, 16))) < CLOSE
    engine.lora = None
