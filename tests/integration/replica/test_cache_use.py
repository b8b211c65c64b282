"""A real engine whose KV cache is short: what it preempts and what it finds in its cache is counted."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from support.engine_requests import RunningRequest
from support.vllm_engine import Engine, started

from seamless_verl.replica import scheduler
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.replica.scheduler import EngineCounts
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.trajectory.records import Finish

pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]
BLOCK, BLOCKS = 32, 12
LONG = 150  # tokens: four such requests grow to five blocks each
OPTIONS = {
    "scheduler_cls": scheduler.SCHEDULER_CLS,
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS + 1,  # vLLM keeps one for itself
    "max_model_len": 320,
}


def test_preemptions_and_cached_prompts_are_counted(nano: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for log_stats in (False, True):
        options = OPTIONS | {"disable_log_stats": not log_stats}
        with started(nano / "model", cores=cores, devices=[len(cores) - 1], **options) as engine:
            engine.run(scenario(engine))


async def scenario(engine: Engine) -> None:
    source, counts = AsyncLLMSource(engine.llm, version=0), EngineCounts(engine.llm)
    n = 3 * await reset_while_it_runs(source)
    assert counts.preempted == 0, "a cache that is reset was not short"
    assert (source.prompt_tokens, source.cached_tokens) == (n, 0)
    await cut_before_it_begins(source)
    assert (source.prompt_tokens, source.cached_tokens) == (n, 0)

    requests = [RunningRequest(source, f"long {number}", [number + 1] * 5, LONG) for number in range(4)]
    await asyncio.gather(*(request.task for request in requests))
    assert all(len(request.column("ids")) == LONG for request in requests)
    assert counts.preempted > 0 and (source.prompt_tokens, source.cached_tokens) == (20 + n, 0)

    before = counts.preempted
    for name in ("first", "second"):  # two whole blocks and one token that is computed in any case
        await RunningRequest(source, name, [9] * (2 * BLOCK + 1), 1).task
    assert (source.prompt_tokens, source.cached_tokens) == (20 + n + 2 * (2 * BLOCK + 1), 2 * BLOCK)
    assert counts.preempted == before


async def reset_while_it_runs(source: AsyncLLMSource) -> int:
    """A commit drops the KV cache of a running request, which vLLM preempts for it; returns how many requests it took:
    one may end before the pause, where this process is held up."""
    for tries in range(1, 9):
        request = RunningRequest(source, f"one {tries}", [1, 2, 3], 300)
        await request.produced(1)
        await source.pause(PauseMode.KEEP)
        if source.in_flight:
            break
        await source.resume()
    assert len(source.in_flight) == 1
    await source.commit(1)
    await source.resume()
    await request.task
    return tries


async def cut_before_it_begins(source: AsyncLLMSource) -> None:
    await source.pause(PauseMode.KEEP)
    request = RunningRequest(source, "cut", [4, 5, 6], 60)
    while not source.in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0)  # it waits for the engine's client; the test's timeout bounds it
    await source.pause(PauseMode.ABORT)
    await request.task
    await source.resume()
    assert request.finish is Finish.CUT and request.column("ids") == []
