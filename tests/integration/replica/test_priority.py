"""A real engine that orders by priority, whose KV cache is short: calls of older prompts keep their place in it, those
of younger ones are put off, and no token of either is lost."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
import torch
from support.engine_requests import PROMPTS, RunningRequest
from support.vllm_engine import started

from seamless_verl.replica import scheduler
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.precedence import Precedence
from seamless_verl.trajectory.records import Finish

pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]
BLOCK, BLOCKS, LONGEST = 32, 12, 320
YOUNG, OLD = 270, 80  # tokens: three calls of 9 or 10 blocks, three of 3 or 4
OPTIONS = {
    "scheduler_cls": scheduler.SCHEDULER_CLS,
    "scheduling_policy": "priority",
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS + 1,  # vLLM keeps one for itself
    "max_model_len": LONGEST,
}


async def scenario(source: AsyncLLMSource) -> tuple[list[str], dict[str, RunningRequest]]:
    """The young ones run already when the old ones come; returns the order in which they ended.

    It is begun again where one ended before: this process was held up for longer than a call takes.
    """
    ended: list[str] = []
    calls: dict[str, RunningRequest] = {}

    def start(name: str, prompt: list[int], tokens: int, version: int) -> None:
        calls[name] = RunningRequest(source, name, prompt, tokens, priority=Precedence(version, True, 0, 0).priority)
        calls[name].task.add_done_callback(lambda _: ended.append(name))

    for number, prompt in enumerate(PROMPTS[:3]):
        start(f"young {number}", prompt, YOUNG, 2)
    await asyncio.gather(*(call.produced(1) for call in calls.values()))
    await source.pause(PauseMode.KEEP)
    if ended:
        await source.resume()
        await asyncio.gather(*(call.task for call in calls.values()))
        return await scenario(source)
    for number, prompt in enumerate(PROMPTS[:3]):
        start(f"old {number}", prompt, OLD, 1)
    while len(source.in_flight) < len(calls):  # noqa: ASYNC110
        await asyncio.sleep(0)  # it waits for the engine's client; the test's timeout bounds it
    await source.resume()
    await asyncio.gather(*(call.task for call in calls.values()))
    return ended, calls


def largest_error(model: torch.nn.Module, call: RunningRequest) -> float:
    """Of every token's logprob against transformers."""
    ids = torch.tensor(call.prompt + call.column("ids"))
    with torch.no_grad():
        rows = model(ids[None]).logits[0, len(call.prompt) - 1 : -1].log_softmax(-1)
    expected = rows.gather(1, ids[len(call.prompt) :, None])[:, 0]
    return float((expected - torch.tensor(call.column("logprobs"))).abs().max())


def test_where_the_cache_is_short_older_prompts_end_first_and_no_token_is_lost(nano: Path) -> None:
    from transformers import AutoModelForCausalLM

    blocks = {tokens: -(-(max(map(len, PROMPTS[:3])) + tokens) // BLOCK) for tokens in (OLD, YOUNG)}
    assert 3 * blocks[OLD] <= BLOCKS < 2 * blocks[YOUNG], "the old fit together, and no two of the young do"
    model = AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)
    cores = sorted(os.sched_getaffinity(0))
    with started(nano / "model", cores=cores, devices=[len(cores) - 1], **OPTIONS) as engine:
        source = AsyncLLMSource(engine.llm, version=0)
        ended, calls = engine.run(scenario(source))
        assert source.in_flight == {}
    assert {name.split()[0] for name in ended[:3]} == {"old"}, ended
    for name, call in calls.items():
        wanted = OLD if name.startswith("old") else YOUNG
        assert call.finish is Finish.LENGTH and len(call.column("ids")) == wanted
        assert set(call.column("version")) == {0}
        assert largest_error(model, call) < 1e-3
