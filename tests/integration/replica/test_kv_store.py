"""Stores beside an engine's KV cache: after an update no token is generated from KV of older weights."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from support.engine_requests import RunningRequest
from support.kv_store import FOLDER, LastingStore, Store, TieredStore
from support.vllm_engine import redrawn, started

from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.replica.scheduler import SCHEDULER_CLS, lasting_stores
from seamless_verl.rollout.engine import PauseMode

pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]
PROMPT = [5, 6, 7] * 100


@pytest.mark.parametrize("store", [Store, TieredStore])
def test_no_token_comes_from_kv_of_older_weights(nano: Path, tmp_path: Path, store: type[LastingStore]) -> None:
    from transformers import AutoModelForCausalLM

    first = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    second, weights = redrawn(first, 1)
    transfer = {
        "kv_connector": store.__name__,
        "kv_connector_module_path": store.__module__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {FOLDER: str(tmp_path)},
    }
    cores = sorted(os.sched_getaffinity(0))
    options = {"kv_transfer_config": transfer, "scheduler_cls": SCHEDULER_CLS}
    with started(nano / "model", cores=cores, devices=[len(cores) - 1], **options) as engine:
        source = AsyncLLMSource(engine.llm, version=0)

        async def scenario() -> list[RunningRequest]:
            before = RunningRequest(source, "before", PROMPT, 8)
            await before.task
            await engine.llm.reset_prefix_cache()  # so that what follows is found in the store alone
            found = RunningRequest(source, "found", PROMPT, 600)
            await found.produced(20)
            assert source.cached_tokens > 200, "nothing was found in the store"
            await source.pause(PauseMode.KEEP)
            await engine.update(weights, bucket_mb=16, caches=False)
            await source.commit(1)
            await source.resume()
            after = RunningRequest(source, "after", PROMPT, 8)
            await asyncio.gather(found.task, after.task)
            return [before, found, after]

        models = (first, second)
        for call in engine.run(scenario()):
            ids = torch.tensor(call.prompt + call.column("ids"))
            with torch.no_grad():
                rows = [model(ids[None]).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1) for model in models]
            versions = call.column("version")
            expected = [rows[v][i, ids[len(PROMPT) + i]].item() for i, v in enumerate(versions)]
            assert call.column("logprobs") == pytest.approx(expected, abs=1e-3), call
        assert set(versions) == {1}


def test_a_store_that_cannot_be_reset_is_refused() -> None:
    assert lasting_stores(None) == []
    lasting, kept = (object.__new__(one) for one in (LastingStore, Store))
    assert lasting_stores(kept) == []
    kept._connectors = [lasting]
    assert lasting_stores(kept) == lasting_stores(lasting) == ["LastingStore"]
