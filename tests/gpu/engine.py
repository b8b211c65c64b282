"""vLLM alone, as a replica runs it: AsyncLLM with the worker extension and scheduler, behind the source of chunks."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
import uuid
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil
from support.engine_requests import RunningRequest
from support.vllm_engine import Engine

from gpu.place import Place
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.replica.scheduler import SCHEDULER_CLS
from seamless_verl.replica.worker_extension import check_replies, extension_name
from seamless_verl.rollout.call import Call, Calls
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.trajectory.records import Finish
from seamless_verl.weights.staging import StagingMemory

PROMPTS = [[1 + i] * (16 + 8 * (i % 4)) for i in range(16)]
BUCKET = 512 << 20
CLOSE = {"cuda": 0.1, "cpu": 1e-3}  # largest difference of logprobs from transformers: bf16 kernels, and fp32


def settings(place: Place, **options: Any) -> dict[str, Any]:
    """The engine's arguments, as verl's server gives them: CUDA graphs on the card, eager on the CPU."""
    common = {
        "model": str(place.model),
        "skip_tokenizer_init": True,
        "enable_sleep_mode": True,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": extension_name(),
        "scheduler_cls": SCHEDULER_CLS,
        "disable_log_stats": True,
    }
    if place.cuda:
        device: dict[str, Any] = {"dtype": "bfloat16", "enforce_eager": False, "gpu_memory_utilization": 0.4}
    else:
        device = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 64 << 20}
    return {**common, **device, **options}


@contextmanager
def engine_of(place: Place, **options: Any) -> Iterator[Engine]:
    """A running engine; how long it took to start is reported."""
    arguments, began = settings(place, **options), time.perf_counter()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def build() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    job = {"VERL_RAY_JOB_ID": uuid.uuid4().hex[:8], "VERL_REPLICA_RANK": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ.update(job)
    with asyncio.Runner() as runner:
        engine = Engine(runner.run(build()), runner, "0")
        mode = str(engine.llm.vllm_config.compilation_config.cudagraph_mode)
        place.report("engine", start_s=time.perf_counter() - began, cuda_graphs=mode)
        try:
            yield engine
        finally:
            engine.close()


def check_requests(place: Place) -> None:
    with engine_of(place) as engine:
        if place.cuda:
            graphs = engine.llm.vllm_config.compilation_config.cudagraph_mode
            assert graphs.has_full_cudagraphs() or graphs.has_piecewise_cudagraphs(), graphs
        for part in (generation, keep_pause, continuation):
            place.report(part.__name__, **engine.run(part(engine)))


async def generation(engine: Engine) -> dict[str, Any]:
    """Tokens a second at 1, 16 and 64 in flight; each request gets all of its tokens, with a logprob each."""
    source, rates = AsyncLLMSource(engine.llm, version=0), {}
    for count in (1, 16, 64):
        began = time.perf_counter()
        calls = [RunningRequest(source, f"rate-{count}-{i}", PROMPTS[i % 16], 128) for i in range(count)]
        await asyncio.gather(*(call.task for call in calls))
        rates[f"tokens_per_s_{count}"] = 128 * count / (time.perf_counter() - began)
        for call in calls:
            assert len(call.column("ids")) == len(call.column("logprobs")) == 128 and call.finish is Finish.LENGTH
    return rates


async def keep_pause(engine: Engine) -> dict[str, Any]:
    """A keep-pause freezes requests; after the resume they go on to the tokens of a run that was never paused."""
    source, fields = AsyncLLMSource(engine.llm, version=0), {"temperature": 0.0}
    await (whole := RunningRequest(source, "whole", PROMPTS[0], 256, **fields)).task
    await (frozen := RunningRequest(source, "frozen", PROMPTS[0], 256, **fields)).produced(20)
    began = time.perf_counter()
    await source.pause(PauseMode.KEEP)
    paused = time.perf_counter() - began
    await asyncio.sleep(0.5)  # a pause of a known length, in which no token may come
    before = len(frozen.column("ids"))
    await asyncio.sleep(0.5)
    assert len(frozen.column("ids")) == before < 256, "the engine went on while it was paused"
    began = time.perf_counter()
    await source.resume()
    await frozen.produced(before + 1)
    resumed = time.perf_counter() - began
    await frozen.task
    same = sum(a == b for a, b in zip(whole.column("ids"), frozen.column("ids"), strict=True))
    return {"pause_ms": 1e3 * paused, "resume_to_token_ms": 1e3 * resumed, "tokens_as_unpaused": same, "of": 256}


async def continuation(engine: Engine) -> dict[str, Any]:
    """A call that an abort cuts twice continues and ends with its whole budget; the seconds until it goes on."""
    source, waits = AsyncLLMSource(engine.llm, version=0), list[float]()
    fleet = Fleet()
    fleet.commit(0)
    fleet.add("a", engine=source, control=source, capacity=64, version=0)
    calls, ids = Calls(fleet), list[int]()
    grew = asyncio.Condition()

    async def run() -> None:
        wanted = Call("cut", array("i", PROMPTS[1]), {"temperature": 1.0, "max_tokens": 300, "ignore_eos": True})
        async for chunk in calls.stream(wanted):
            assert chunk.error is None, chunk.error
            async with grew:
                ids.extend(chunk.ids)
                grew.notify_all()

    async def has(tokens: int) -> None:
        async with grew:
            await grew.wait_for(lambda: len(ids) >= tokens)

    task = asyncio.create_task(run())
    for turn in (1, 2):
        await has(50 * turn)
        await fleet.pause(["a"], PauseMode.ABORT)
        before, began = len(ids), time.perf_counter()
        await fleet.resume(["a"])
        await has(before + 1)
        waits.append(time.perf_counter() - began)
    await task
    calls.check_integrity()
    assert len(ids) == 300, f"{len(ids)} tokens of 300"
    return {"continue_ms": [1e3 * wait for wait in waits]}


def used_bytes(place: Place) -> int:
    """Memory in use on the card, by whatever process; on the CPU the resident memory of this process's children."""
    if place.cuda:
        from gpu.nvml import memory_used

        return memory_used()
    return sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))


def check_sleep(place: Place) -> None:
    """Each level frees memory and takes it back; level 1 keeps the weights, level 2 needs a load."""
    with engine_of(place) as engine:
        for level in (1, 2):
            place.report(f"level_{level}", **engine.run(asleep(place, engine, level)))


async def asleep(place: Place, engine: Engine, level: int) -> dict[str, Any]:
    async def logprobs() -> list[float]:
        source = AsyncLLMSource(engine.llm, version=0)
        await (call := RunningRequest(source, uuid.uuid4().hex, PROMPTS[2], 32, temperature=0.0)).task
        return call.column("logprobs")

    before, awake, began = await logprobs(), used_bytes(place), time.perf_counter()
    await engine.llm.sleep(level=level)
    check_replies(await engine.llm.collective_rpc("drop_memory") if level == 2 else [])
    slept, asleep_bytes = time.perf_counter() - began, used_bytes(place)
    began = time.perf_counter()
    await engine.llm.wake_up()
    woke = time.perf_counter() - began
    figures = {"sleep_s": slept, "wake_s": woke, "freed_gb": (awake - asleep_bytes) / 1e9, "awake_gb": awake / 1e9}
    if place.cuda:
        assert awake - asleep_bytes > 1e9, f"{figures}: the engine's memory was not freed"
    if level == 1:
        after = await logprobs()
        figures["largest_difference"] = max(abs(a - b) for a, b in zip(before, after, strict=True))
        assert figures["largest_difference"] < CLOSE[place.platform], figures
    return figures


def check_load(place: Place) -> None:
    """Staged weights, twice as many as an engine has ever loaded in a row: the logprobs are those of the new ones."""
    import torch
    from transformers import AutoModelForCausalLM

    with engine_of(place) as engine:
        dtype = torch.bfloat16 if place.cuda else torch.float32
        model, memory = AutoModelForCausalLM.from_pretrained(place.model, dtype=dtype), StagingMemory("here")
        for turn in (1, 2, 3):
            changed(model, seed=turn)
            weights = dict(model.to("cuda" if place.cuda else "cpu").named_parameters())
            figures = engine.run(load(engine, weights, memory, version=turn))
            error, mean = engine.run(distance(place, engine, model))
            place.report(f"load_{turn}", **figures, largest_error=error, mean_error=mean)
            assert mean < CLOSE[place.platform] / 4 and error < 4 * CLOSE[place.platform], (error, mean)
        memory.close()


def changed(model: Any, seed: int) -> None:
    """Other weights, in place: enough to be told from the old ones by their logprobs."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.1 * noise if weight.ndim == 1 else 0.9 / weight.shape[-1] ** 0.5 * noise)


async def load(engine: Engine, weights: Mapping[str, Any], memory: StagingMemory, version: int) -> dict[str, Any]:
    """Stage, map and load these weights while the engine is paused; seconds of each, and GB a second.

    From the second version in the same memory on, it is pinned and weights are copied into it asynchronously.
    """
    began = time.perf_counter()
    memory.begin()
    for name, weight in weights.items():
        memory.add(name, weight)
    staged = memory.end(version)
    stage_s = time.perf_counter() - began
    check_replies(await engine.llm.collective_rpc("map_staged", args=(pickle.dumps([staged]),)))
    await engine.llm.pause_generation(mode="keep")
    began = time.perf_counter()
    check_replies(await engine.llm.collective_rpc("load_staged", args=(version, BUCKET)))
    load_s = time.perf_counter() - began
    await engine.llm.reset_prefix_cache()
    await engine.llm.resume_generation()
    planned = await engine.llm.collective_rpc(has_plan)
    size = staged.size / 1e9
    rates = {"stage_gb_s": size / stage_s, "load_gb_s": size / load_s}
    return {"gb": size, "stage_s": stage_s, "load_s": load_s, **rates, "planned": all(planned)}


def has_plan(worker: Any) -> bool:
    return worker.plan_cache.plan is not None


async def distance(place: Place, engine: Engine, model: Any) -> tuple[float, float]:
    """Largest and mean difference of the engine's logprobs from those of transformers."""
    import torch

    model = model.to("cuda" if place.cuda else "cpu")
    source, errors = AsyncLLMSource(engine.llm, version=0), []
    for prompt in PROMPTS[:4]:
        await (call := RunningRequest(source, uuid.uuid4().hex, prompt, 64)).task
        ids = torch.tensor(prompt + call.column("ids"), device=model.device)
        with torch.no_grad():
            rows = model(ids[None]).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        expected = rows.gather(1, ids[len(prompt) :, None])[:, 0].cpu()
        errors.append((expected - torch.tensor(call.column("logprobs"))).abs())
    model.to("cpu")
    every = torch.cat(errors)
    return every.max().item(), every.mean().item()
