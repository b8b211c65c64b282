"""Weights loaded from memory that the engine's process shares with the process that staged them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support.vllm_engine import Engine, largest_error, no_generation, processes, redrawn, started

from seamless_verl.replica.load_plan import PlanCache
from seamless_verl.replica.worker_extension import MappedReceiver, check_replies, extension_name
from seamless_verl.weights.staging import StagingMemory

pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.slowest(11),
]
PROMPTS = [[1, 2, 3, 4, 5], [10, 20, 30], [7] * 12, [100, 90, 80, 70]]
CLOSE, FAR = 1e-3, 0.1
FIRST = "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"
USABLE = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(nano: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {"tensor_parallel_size": request.param, "worker_extension_cls": extension_name()}
    with started(nano / "model", cores=USABLE, devices=range(request.param), **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def loaded(nano: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)


async def load(
    engine: Engine,
    memory: StagingMemory,
    weights: Mapping[str, torch.Tensor],
    loaded: Callable[[], None] = lambda: None,
) -> float:
    """Seconds for which the load paused the engine; `loaded` is called before the resume."""
    memory.seal = "sample"
    memory.begin()
    for name, weight in weights.items():
        memory.add(name, weight)
    staged = pickle.dumps([memory.end(1)])
    check_replies(await engine.llm.collective_rpc("map_staged", args=(staged,)))
    async with no_generation(engine, "keep"):
        began = time.perf_counter()
        check_replies(await engine.llm.collective_rpc("load_staged", args=(1, 16 << 20)))
        await engine.llm.reset_prefix_cache()
        took = time.perf_counter() - began
        loaded()
        return took


async def planned(engine: Engine) -> list[bool]:
    """Whether each worker has a load plan."""
    return await engine.llm.collective_rpc(lambda worker: worker.plan_cache.plan is not None)


def test_a_load_takes_effect_exactly(engine: Engine, loaded: Any) -> None:
    memory = StagingMemory("here")
    for seed in (1, 2, 3):
        renewed, weights = redrawn(loaded, seed=seed)
        engine.run(load(engine, memory, weights))
        assert all(engine.run(planned(engine))), "later loads would go through the model's loaders again"
        samples = engine.run(engine.samples(PROMPTS, 48))
        assert largest_error(renewed, samples) < CLOSE
        assert largest_error(loaded, samples) > FAR, "the old weights would not have been distinguished"


def test_a_loading_engine_has_real_time_priority_until_it_generates(engine: Engine, loaded: Any) -> None:
    """Alone, for workers in parallel wait for messages by spinning."""
    alone = not processes("VLLM::Worker")
    working = [*processes("VLLM::Worker"), *processes("EngineCore")]
    may = subprocess.run([sys.executable, "-c", FIRST], stderr=subprocess.DEVNULL).returncode == 0

    def policies() -> set[int]:
        threads = [thread.id for process in working for thread in process.threads()]
        return {os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK for thread in threads}

    standing = list[set[int]]()
    memory, weights = StagingMemory("here"), dict(loaded.named_parameters())
    for _ in range(2):
        engine.run(load(engine, memory, weights, lambda: standing.append(policies())))
        engine.run(engine.samples(PROMPTS, 4))
        assert policies() == {os.SCHED_OTHER}
    assert standing[-1] == {os.SCHED_FIFO if alone and may else os.SCHED_OTHER}


def test_many_loads_leak_no_memory_and_take_milliseconds(engine: Engine, loaded: Any) -> None:
    weights, memory = dict(loaded.named_parameters()), StagingMemory("here")
    worker = (processes("VLLM::Worker") or processes("EngineCore"))[0]
    for _ in range(10):
        engine.run(load(engine, memory, weights))
    before = worker.memory_info().rss
    took = [engine.run(load(engine, memory, weights)) for _ in range(100)]
    size = sum(weight.nbytes for weight in weights.values())
    print(f"\n{size / 1e6:.1f} MB, ms: median {1e3 * median(took):.1f}, longest {1e3 * max(took):.1f}")  # noqa: T201
    assert worker.memory_info().rss - before < 10 * size


def test_weights_whose_writer_is_gone_are_an_error_that_the_engine_survives(engine: Engine, loaded: Any) -> None:
    memory = StagingMemory("here")
    engine.run(load(engine, memory, dict(loaded.named_parameters())))
    lost = pickle.dumps([memory.weights])
    memory.begin()

    async def asked(method: str, *args: Any) -> None:
        check_replies(await engine.llm.collective_rpc(method, args=args))

    with pytest.raises(Exception, match="has no weights in its memory"):
        engine.run(asked("map_staged", lost))
    with pytest.raises(Exception, match="version 2 is not mapped"):
        engine.run(asked("load_staged", 2, 16 << 20))
    assert largest_error(loaded, engine.run(engine.samples(PROMPTS, 16))) < CLOSE


def test_more_than_a_bucket_comes_in_several_and_the_last_is_marked() -> None:
    memory = StagingMemory("here")
    memory.begin()
    for i in range(5):
        memory.add(str(i), torch.full((10,), float(i)))
    memory.add("large", torch.zeros(1000))
    got: list[tuple[list[str], bool]] = []
    receiver = MappedReceiver(memory.end(1).map(), 100, PlanCache(), [], "", torch.device("cpu"), True)
    receiver.receive_weights(lambda bucket, last: got.append(([name for name, _ in bucket], last)))
    assert got == [(["0", "1"], False), (["2", "3"], False), (["4"], False), (["large"], True)]


def test_weights_and_cache_that_were_dropped_come_back_by_a_load(engine: Engine, loaded: Any) -> None:
    """As a released replica does it: everything is put away, and the same version is loaded again."""
    memory, (renewed, weights) = StagingMemory("here"), redrawn(loaded, seed=4)
    engine.run(load(engine, memory, weights))
    worker = (processes("VLLM::Worker") or processes("EngineCore"))[0]

    def largest_weight(worker: Any) -> float:
        """The largest in pages that are wholly a parameter's; small ones share theirs with others."""
        large = [parameter for parameter in worker.model_runner.model.parameters() if parameter.nbytes > 1 << 16]
        return max(float(parameter.detach().flatten()[1024:-1024].abs().max()) for parameter in large)

    def put_away_and_load() -> tuple[int, set[float]]:
        async def drop() -> set[float]:
            await engine.llm.sleep(level=2)
            await engine.llm.collective_rpc("drop_memory")
            return set(await engine.llm.collective_rpc(largest_weight))

        before = worker.memory_info().rss
        largest = engine.run(drop())
        freed = before - worker.memory_info().rss
        engine.run(engine.llm.wake_up())
        engine.run(load(engine, memory, weights))
        return freed, largest

    engine.run(engine.samples(PROMPTS, 48))  # fills blocks of the cache
    freed, largest = put_away_and_load()
    size = sum(weight.nbytes for weight in weights.values())
    assert freed > size // 2 // len(processes("VLLM::Worker") or [worker]), f"{freed} of {size} bytes"
    assert largest == {0.0}, "not all weights were dropped"
    assert all(engine.run(planned(engine))), "addresses have changed"
    samples = engine.run(engine.samples(PROMPTS, 48))
    assert largest_error(renewed, samples) < CLOSE
