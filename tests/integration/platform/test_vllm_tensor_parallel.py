"""A replica of two devices: two workers, each on its own core, one thread each, and still exact."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.vllm_engine import Engine, allowed_cores, largest_error, processes, started

USABLE = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.skipif(len(USABLE) < 2, reason="two devices are two cores"),
    pytest.mark.slowest(10),
]


@pytest.fixture(scope="module")
def engine(nano: Path) -> Iterator[Engine]:
    with started(nano / "model", cores=USABLE[:2], devices=[1, 0], tensor_parallel_size=2) as engine:
        yield engine


def test_two_devices_are_two_workers_each_on_its_core(engine: Engine, nano: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    assert largest_error(loaded, engine.run(engine.samples([[1, 2, 3], [4, 5, 6, 7]], 32))) < 1e-3
    (core,) = processes("EngineCore")
    workers = processes("VLLM::Worker")
    assert [allowed_cores(worker) for worker in workers] == [{USABLE[1]}, {USABLE[0]}]
    assert engine.run(engine.torch_threads()) == [1, 1]
    assert allowed_cores(core) == set(USABLE), "the engine's core process is not a worker"
