"""A replica of two devices: two workers, each on its own core, one thread each, and still exact."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm_engine import Engine, allowed_cores, largest_error, processes, start

from seamless_verl.platform.cores import CPU_CORES, VISIBLE_DEVICES

USABLE = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.skipif(len(USABLE) < 2, reason="two devices are two cores"),
]


@pytest.fixture(scope="module")
def engine(nano: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setenv("VERL_PLATFORM", "cpu")
        patch.setenv("VERL_RAY_JOB_ID", uuid.uuid4().hex[:8])
        patch.setenv("VERL_REPLICA_RANK", "0")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        patch.setenv(CPU_CORES, f"{USABLE[0]},{USABLE[1]}")
        patch.setenv(VISIBLE_DEVICES, "1,0")
        engine = start(nano / "model", runner, tensor_parallel_size=2)
        yield engine
        engine.close()


def test_two_devices_are_two_workers_each_on_its_core(engine: Engine, nano: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    assert largest_error(loaded, engine.run(engine.samples([[1, 2, 3], [4, 5, 6, 7]], 32))) < 1e-3
    (core,) = processes("EngineCore")
    workers = processes("VLLM::Worker")
    assert [allowed_cores(worker) for worker in workers] == [{USABLE[1]}, {USABLE[0]}]
    assert engine.run(engine.torch_threads()) == [1, 1]
    assert allowed_cores(core) == set(USABLE), "the engine's core process is not a worker"
