"""How long a real engine's calls wait for a resume and a hand-over, and what a kept KV cache costs in logprobs.

The figures are printed: `scripts/test tests/integration/replica/test_times.py -s`.
"""

from __future__ import annotations

import asyncio
import copy
import os
import time
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from support.engine_requests import RunningRequest
from support.vllm_engine import Engine, started

from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.call import Call, Calls
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.transport import RemoteEngine, serve_engine

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),  # vLLM's client leaves it to the collector
    pytest.mark.long,
    pytest.mark.serial,
]
CALLS, TOKENS, REPEATS = 32, 600, 7
USABLE = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def engine(nano: Path) -> Iterator[Engine]:
    with started(nano / "model", cores=USABLE, devices=[len(USABLE) - 1], max_num_seqs=CALLS) as engine:
        yield engine


class Runner:
    """Calls over one replica through TCP; `arrived` has the time and the number of tokens of each chunk."""

    def __init__(self, fleet: Fleet) -> None:
        self.calls = Calls(fleet)
        self.arrived: list[list[tuple[float, int]]] = [[] for _ in range(CALLS)]
        self.grew = asyncio.Condition()

    async def run(self, i: int) -> None:
        fields = {"temperature": 1.0, "max_tokens": TOKENS, "ignore_eos": True}
        async with aclosing(self.calls.stream(Call(f"call-{i}", array("i", [1 + i] * 40), fields))) as chunks:
            async for chunk in chunks:
                assert chunk.error is None, chunk.error
                async with self.grew:
                    self.arrived[i].append((time.perf_counter(), len(chunk.ids)))
                    self.grew.notify_all()

    async def all_have(self, tokens: int) -> None:
        async with self.grew:
            await self.grew.wait_for(lambda: all(sum(n for _, n in chunks) >= tokens for chunks in self.arrived))

    async def first_after(self, began: float) -> float:
        """Seconds from `began` until every call has a new token."""

        def firsts() -> list[float]:
            return [min((at for at, n in chunks if n and at > began), default=0.0) for chunks in self.arrived]

        async with self.grew:
            await self.grew.wait_for(lambda: all(firsts()))
        return max(firsts()) - began


@asynccontextmanager
async def fleet_of(engine: Engine) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        source = AsyncLLMSource(engine.llm, version=0)
        server = await serve_engine(source, "127.0.0.1", 0, token="t", replica_id="a")
        stack.push_async_callback(server.close)
        remote = await RemoteEngine.connect("127.0.0.1", server.port, token="t", replica_id="a")
        stack.callback(remote.close)
        fleet = Fleet()
        fleet.add("a", engine=remote, control=source, capacity=CALLS)
        fleet.commit(0)
        await serve(fleet)
        yield fleet


async def serve(fleet: Fleet) -> None:
    await fleet.begin_sync(["a"])
    await fleet.end_sync(["a"], 0)


def test_calls_wait_milliseconds_for_a_resume_and_for_a_hand_over(engine: Engine) -> None:
    async def scenario() -> tuple[list[float], list[float], list[float], list[int]]:
        resumed, released, resumed_elsewhere = [], [], []
        async with fleet_of(engine) as fleet:
            runner = Runner(fleet)
            tasks = [asyncio.create_task(runner.run(i)) for i in range(CALLS)]
            for turn in range(REPEATS):
                await runner.all_have(20 * (turn + 1))
                await fleet.pause(["a"], PauseMode.KEEP)
                began = time.perf_counter()
                await fleet.resume(["a"])
                resumed.append(await runner.first_after(began))
                began = time.perf_counter()
                assert await fleet.release(["a"]) == ["a"]
                released.append(time.perf_counter() - began)
                await fleet.reclaim(["a"])
                began = time.perf_counter()
                await serve(fleet)
                resumed_elsewhere.append(await runner.first_after(began))
            await asyncio.gather(*tasks)
            runner.calls.check_integrity()
            return resumed, released, resumed_elsewhere, [sum(n for _, n in chunks) for chunks in runner.arrived]

    resumed, released, resumed_elsewhere, tokens = engine.run(scenario())
    print(  # noqa: T201
        f"\n{CALLS} calls, ms: resume to the first token of all {1e3 * median(resumed):.1f}, "
        f"hand-over {1e3 * median(released):.1f} (longest {1e3 * max(released):.1f}), "
        f"continued calls to their first token, with prefill {1e3 * median(resumed_elsewhere):.1f}"
    )
    assert tokens == [TOKENS] * CALLS, "a call lost or gained a token"
    assert median(resumed) < 0.050 and median(released) < 0.300


def with_small_changes(model: Any, by: float) -> tuple[Any, dict[str, torch.Tensor]]:
    """A copy with all weights changed by `by` up or down, like a first step of Adam with that learning rate."""
    generator, model = torch.Generator().manual_seed(0), copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(by * torch.randn(weight.shape, generator=generator).sign())
    return model, {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("rate", [1e-5, 1e-4, 1e-3])
def test_a_kept_cache_changes_later_logprobs_by_little_and_an_update_by_more(
    engine: Engine, nano: Path, rate: float
) -> None:
    from transformers import AutoModelForCausalLM

    old = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    new, weights = with_small_changes(old, rate)

    async def scenario(keep: bool) -> list[RunningRequest]:
        source = AsyncLLMSource(engine.llm, version=0, keep_kv=keep)
        calls = [RunningRequest(source, f"{keep}-{i}", [3 + i] * 40, 240) for i in range(8)]
        await asyncio.gather(*(call.produced(100) for call in calls))
        await source.pause(PauseMode.KEEP)
        await engine.update(weights, bucket_mb=16)
        await source.commit(1)
        await source.resume()
        await asyncio.gather(*(call.task for call in calls))
        await engine.update(dict(old.named_parameters()), bucket_mb=16)
        return calls

    kept, fresh = (errors(engine.run(scenario(keep)), new) for keep in (True, False))
    stale = errors(engine.run(scenario(False)), old)
    print(  # noqa: T201
        f"\nrate {rate:g}, |logprob - that of the new weights| of later tokens, mean and largest: "
        f"kept {kept.mean():.1e} {kept.max():.1e}, recomputed {fresh.mean():.1e} {fresh.max():.1e}; "
        f"under the old weights {stale.mean():.1e} {stale.max():.1e}"
    )
    assert fresh.max() < 1e-3, "the cache was not recomputed"
    assert kept.mean() < stale.mean() or rate < 1e-4


@pytest.mark.parametrize("keep", [True, False], ids=["keep", "recompute"])
def test_a_kept_cache_serves_later_turns_of_its_conversation_alone(engine: Engine, nano: Path, keep: bool) -> None:
    from transformers import AutoModelForCausalLM

    old = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    new, weights = with_small_changes(old, 1e-2)

    async def scenario() -> dict[str, float]:
        source = AsyncLLMSource(engine.llm, version=0, keep_kv=keep)
        prompt = [5 + i % 90 for i in range(300)]  # more than a block of the cache
        await (first := RunningRequest(source, f"first-{keep}", prompt, 4, conversation="talk")).task
        await source.pause(PauseMode.KEEP)
        await engine.update(weights, bucket_mb=16, caches=False)
        await source.commit(1)
        await source.resume()
        longer = prompt + first.column("ids")
        names = ("talk", "other", "")
        later = {name: RunningRequest(source, f"{name}-{keep}", longer, 8, conversation=name) for name in names}
        await asyncio.gather(*(call.task for call in later.values()))
        await engine.update(dict(old.named_parameters()), bucket_mb=16)
        return {name: errors([call], new).max().item() for name, call in later.items()}

    found = engine.run(scenario())
    assert max(found["other"], found[""]) < 1e-3, "a cache of older weights was used"
    assert (found["talk"] > 1e-3) is keep


def errors(calls: list[RunningRequest], model: Any) -> torch.Tensor:
    """Of the tokens of version 1, against transformers."""
    found = []
    for call in calls:
        ids, versions = torch.tensor(call.prompt + call.column("ids")), torch.tensor(call.column("version"))
        with torch.no_grad():
            rows = model(ids[None]).logits[0, len(call.prompt) - 1 : -1].log_softmax(-1)
        expected = rows.gather(1, ids[len(call.prompt) :, None])[:, 0]
        found.append((expected - torch.tensor(call.column("logprobs"))).abs()[versions == 1])
    return torch.cat(found)
