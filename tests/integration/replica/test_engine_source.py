"""vLLM's engine as a source of chunks: requests are cut, frozen and continued, and each token has its version."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_requests import PROMPTS, RunningRequest
from support.vllm_engine import Engine, redrawn, started

from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.engine import EngineRequest, PauseMode
from seamless_verl.trajectory.records import Finish, TokenChunk

pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]
USABLE = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def engine(nano: Path) -> Iterator[Engine]:
    with started(nano / "model", cores=USABLE, devices=[len(USABLE) - 1]) as engine:
        yield engine


@pytest.fixture(scope="module")
def source(engine: Engine) -> AsyncLLMSource:
    return AsyncLLMSource(engine.llm, version=0)


@pytest.fixture(scope="module")
def versions(nano: Path) -> list[tuple[Any, dict[str, torch.Tensor]]]:
    """Models of the versions 0, 1, 2, and the weights that lead to each."""
    from transformers import AutoModelForCausalLM

    first = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    return [(first, dict(first.named_parameters())), *(redrawn(first, seed) for seed in (1, 2))]


def largest_error(call: RunningRequest, versions: list[tuple[Any, Any]]) -> float:
    """Of every token's logprob against transformers under the weights of that token's version."""
    ids = torch.tensor(call.prompt + call.column("ids"))
    with torch.no_grad():
        rows = torch.stack(
            [model(ids[None]).logits[0, len(call.prompt) - 1 : -1].log_softmax(-1) for model, _ in versions]
        )
    place = torch.arange(rows.shape[1])
    expected = rows[torch.tensor(call.column("version")), place, ids[len(call.prompt) :]]
    return (expected - torch.tensor(call.column("logprobs"))).abs().max().item()


def test_frozen_calls_continue_with_new_weights(
    engine: Engine, source: AsyncLLMSource, versions: list[tuple[Any, dict[str, torch.Tensor]]]
) -> None:
    async def scenario() -> list[RunningRequest]:
        calls = [RunningRequest(source, f"frozen-{i}", prompt, 720) for i, prompt in enumerate(PROMPTS)]
        # Also in chunks of many tokens each token has the version of the weights that generated it.
        calls += [
            RunningRequest(source, f"rarely-{i}", prompt, 720, stream_interval=25) for i, prompt in enumerate(PROMPTS)
        ]
        for version in (1, 2):
            have = [len(call.column("ids")) for call in calls]
            await asyncio.gather(*(call.produced(n + 40) for call, n in zip(calls, have, strict=True)))
            await source.pause(PauseMode.KEEP)
            await engine.update(versions[version][1], bucket_mb=16)
            await source.commit(version)
            await source.resume()
        await asyncio.gather(*(call.task for call in calls))
        await source.pause(PauseMode.KEEP)
        await engine.update(versions[0][1], bucket_mb=16)
        await source.commit(0)
        await source.resume()
        return calls

    for call in engine.run(scenario()):
        assert call.finish is Finish.LENGTH and len(call.column("ids")) == 720
        assert call.column("version") == sorted(call.column("version"))
        assert set(call.column("version")) == {0, 1, 2}
        assert len(call.chunks) < 40 or len(call.chunks) > 300
        assert largest_error(call, versions) < 1e-3
        swapped = [versions[1], versions[0], versions[2]]
        assert largest_error(call, swapped) > 0.1, "wrong weights would not have been noticed"


def test_cut_calls_return_what_was_produced(engine: Engine, source: AsyncLLMSource, versions: list[Any]) -> None:
    async def scenario() -> tuple[list[RunningRequest], RunningRequest, RunningRequest]:
        calls = [RunningRequest(source, f"cut-{i}", prompt, 800) for i, prompt in enumerate(PROMPTS)]
        await asyncio.gather(*(call.produced(20) for call in calls))
        await source.pause(PauseMode.ABORT)
        await asyncio.wait_for(asyncio.gather(*(call.task for call in calls)), 10)
        during_pause = RunningRequest(source, "during_pause", [1, 2], 5)
        await during_pause.task
        await source.resume()
        after_resume = RunningRequest(source, "after_resume", [1, 2], 5)
        await after_resume.task
        return calls, during_pause, after_resume

    calls, during_pause, after_resume = engine.run(scenario())
    assert {call.finish for call in [*calls, during_pause]} == {Finish.CUT}
    assert all(20 <= len(call.column("ids")) < 800 for call in calls) and during_pause.column("ids") == []
    assert max(largest_error(call, versions) for call in calls) < 1e-3
    assert after_resume.finish is Finish.LENGTH and len(after_resume.column("ids")) == 5
    assert source.in_flight == {}


def test_a_frozen_call_can_be_cut(engine: Engine, source: AsyncLLMSource) -> None:
    async def scenario() -> RunningRequest:
        call = RunningRequest(source, "kept", [3, 4], 800)
        await call.produced(10)
        await source.pause(PauseMode.KEEP)
        assert not call.task.done()
        await source.pause(PauseMode.ABORT)
        await asyncio.wait_for(call.task, 10)
        await source.resume()
        return call

    assert engine.run(scenario()).finish is Finish.CUT


def test_closing_the_generator_ends_the_request_in_the_engine(engine: Engine, source: AsyncLLMSource) -> None:
    async def scenario() -> None:
        request = EngineRequest("left", array("i", [1, 2]), {"max_tokens": 900, "ignore_eos": True})
        stream = source.generate(request)
        await anext(stream)
        await stream.aclose()
        await engine.llm.wait_for_requests_to_drain(10)

    engine.run(scenario())
    assert source.in_flight == {}


def test_a_request_that_the_engine_refuses_fails_with_the_reason(engine: Engine, source: AsyncLLMSource) -> None:
    async def scenario() -> RunningRequest:
        call = RunningRequest(source, "long", [1] * 2000, 5)
        await call.task
        return call

    (chunk,) = engine.run(scenario()).chunks
    assert chunk.finish_reason is Finish.FAILED and "1024" in str(chunk.stop_reason)


def test_requested_top_logprobs_are_given(engine: Engine, source: AsyncLLMSource) -> None:
    async def scenario() -> list[TokenChunk]:
        fields = {"temperature": 1.0, "max_tokens": 6, "logprobs": 3, "ignore_eos": True}
        return [chunk async for chunk in source.generate(EngineRequest("top", array("i", [5, 6]), fields))]

    for chunk in engine.run(scenario()):
        assert chunk.top is not None and len(chunk.top) == len(chunk.ids)
        for token, logprob, top in zip(chunk.ids, chunk.logprobs, chunk.top, strict=True):
            assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
            assert dict(zip(top.ids, top.logprobs, strict=True))[token] == pytest.approx(logprob, abs=1e-6)
            assert (top.ids.index(token) < 3) == (top.rank <= 3)


def test_a_seed_gives_the_same_tokens_when_the_prefill_is_chunked(engine: Engine, source: AsyncLLMSource) -> None:
    prompts = [[(7 * place + i) % 250 for place in range(900)] for i in range(6)]  # more than a step computes

    async def scenario() -> tuple[list[list[int]], list[list[int]]]:
        together = [RunningRequest(source, f"together-{i}", prompt, 12, seed=i) for i, prompt in enumerate(prompts)]
        await asyncio.wait_for(asyncio.gather(*(call.task for call in together)), 60)
        alone = []
        for i, prompt in enumerate(prompts):
            alone.append(RunningRequest(source, f"alone-{i}", prompt, 12, seed=i))
            await asyncio.wait_for(alone[-1].task, 60)
        return [call.column("ids") for call in together], [call.column("ids") for call in alone]

    together, alone = engine.run(scenario())
    assert together == alone and {len(ids) for ids in together} == {12}


@pytest.mark.parametrize("turns", range(6))
def test_a_request_on_its_way_to_the_engine_is_cut_like_the_others(
    engine: Engine, source: AsyncLLMSource, turns: int
) -> None:
    """`turns` of the loop lie between the last request and the pause."""

    async def scenario() -> list[RunningRequest]:
        calls = [RunningRequest(source, f"on-its-way-{turns}-{i}", [5 + i] * 8, 400) for i in range(8)]
        for _ in range(turns):
            await asyncio.sleep(0)  # each is a step of the requests on their way
        await source.pause(PauseMode.ABORT)
        try:
            await asyncio.wait_for(asyncio.gather(*(call.task for call in calls)), 10)
        finally:
            await source.resume()
        return calls

    assert {call.finish for call in engine.run(scenario())} == {Finish.CUT}


def test_an_engine_that_returns_no_routes_refuses_to_be_asked_for_them(engine: Engine, source: AsyncLLMSource) -> None:
    async def scenario() -> RunningRequest:
        call = RunningRequest(source, "routes", PROMPTS[0], 8, routes_from=1)
        await call.task
        return call

    call = engine.run(scenario())
    assert call.finish is Finish.FAILED and "enable_rollout_routing_replay=True" in str(call.chunks[-1].stop_reason)
    assert call.column("ids") == []
