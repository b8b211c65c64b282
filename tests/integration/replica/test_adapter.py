"""An engine whose adapter is replaced in place, between two of its steps: its tokens are those of the merged model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vllm_engine import Engine, largest_error, no_generation, started

from seamless_verl.replica.worker_extension import check_replies, extension_name
from seamless_verl.weights.staging import StagingMemory

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),  # as in test_loading.py
]
PROMPTS = [[1, 2, 3, 4, 5], [10, 20, 30], [7] * 12, [100, 90, 80, 70]]
RANK, ALPHA = 8, 16
CLOSE, FAR = 1e-4, 0.05


@pytest.fixture(scope="module")
def engine(nano: Path) -> Iterator[Engine]:
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": RANK, "worker_extension_cls": extension_name()}
    with started(nano / "model", cores=[0, 1], devices=[0], **options) as engine:
        yield engine


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


def test_each_adapter_generates_as_the_merged_model_and_the_base_stays(engine: Engine, base: Any) -> None:
    from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
    from vllm.lora.request import LoRARequest

    memory = StagingMemory("here")
    for version in (1, 2):
        merged, adapter = adapted(base, seed=version)
        engine.run(load(engine, memory, version, adapter))
        engine.lora = LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, VLLM_LORA_PATH)
        samples = engine.run(engine.samples(PROMPTS, 48))
        error = largest_error(merged, samples)
        print(f"\nlargest difference of logprobs to the merged model: {error:.1e}")  # noqa: T201
        assert error < CLOSE and largest_error(base, samples) > FAR
        engine.lora = None
        assert largest_error(base, engine.run(engine.samples(PROMPTS, 48))) < CLOSE
    assert memory.size < 2 * sum(weight.nbytes for weight in adapter.values())
