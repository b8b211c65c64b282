"""The experts that vLLM chose come with the chunks of a request, exact across cuts, caches and slow readers."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chosen_experts import LAYERS, as_sets, chosen_experts
from support.engine_requests import RunningRequest
from support.vllm_engine import Engine, started

from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.engine import EngineRequest, PauseMode
from seamless_verl.trajectory.records import TOKEN, Finish, TokenChunk
from seamless_verl.trajectory.routes import joined

pytestmark = [
    pytest.mark.integration,
    # vLLM's client leaves its socket context to the garbage collector.
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]
USABLE = sorted(os.sched_getaffinity(0))
PROMPT = [*range(1, 150)]  # more than a block of the cache


@pytest.fixture(scope="module")
def loaded(moe: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(moe / "model", dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(moe: Path) -> Iterator[Engine]:
    options = {"enable_return_routed_experts": True, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    with started(moe / "model", cores=USABLE, devices=[len(USABLE) - 1], **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def source(engine: Engine) -> AsyncLLMSource:
    return AsyncLLMSource(engine.llm, version=0)


async def run(
    source: AsyncLLMSource, name: str, prompt: list[int], tokens: int, routes_from: int | None = 1, **sampling: Any
) -> list[TokenChunk]:
    fields = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, "seed": len(name), **sampling}
    request = EngineRequest(name, array(TOKEN, prompt), fields, routes_from=routes_from)
    return [chunk async for chunk in source.generate(request)]


def ids_of(chunks: list[TokenChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


def routes_of(chunks: list[TokenChunk]) -> list[list[set[int]]]:
    """The rows of the prompt, once, and of all tokens."""
    of_prompt = [chunk.prompt_routes for chunk in chunks if chunk.prompt_routes is not None]
    whole = joined([*of_prompt, *(chunk.routes for chunk in chunks if chunk.ids)])
    assert whole is not None and len(of_prompt) == 1
    return as_sets(whole.array())


def expected(loaded: Any, ids: list[int], first: int = 1) -> list[list[set[int]]]:
    """The rows of the tokens from `first` on: the choice at the position before each."""
    return chosen_experts(loaded, ids)[first - 1 : -1]


def test_every_token_has_the_choice_with_which_it_was_made(engine: Engine, source: AsyncLLMSource, loaded: Any) -> None:
    """Of a prompt in chunks, of tokens one by one and in chunks of many, and of one whose prompt is in the cache."""

    async def scenario() -> list[list[TokenChunk]]:
        first = await asyncio.gather(
            run(source, "a", PROMPT, 20),
            run(source, "bb", PROMPT[:5], 40, stream_interval=16),
            run(source, "c", [9], 3),
        )
        return [*first, await run(source, "dddd", [*PROMPT, 3], 20)]

    for prompt, chunks in zip((PROMPT, PROMPT[:5], [9], [*PROMPT, 3]), engine.run(scenario()), strict=True):
        assert all(chunk.routes is not None and len(chunk.routes) == len(chunk.ids) for chunk in chunks if chunk.ids)
        assert routes_of(chunks) == expected(loaded, prompt + ids_of(chunks))
        assert len(routes_of(chunks)[0]) == LAYERS
    assert source.cached_tokens >= 128, "the last request found its prompt in the cache"


def test_a_request_gets_the_routes_that_it_asks_for(engine: Engine, source: AsyncLLMSource, loaded: Any) -> None:
    later = engine.run(run(source, "later", PROMPT, 4, routes_from=100))
    assert routes_of(later) == expected(loaded, PROMPT + ids_of(later), 100)
    last = engine.run(run(source, "last", PROMPT, 4, routes_from=len(PROMPT)))
    assert routes_of(last) == expected(loaded, PROMPT + ids_of(last), len(PROMPT)) and len(routes_of(last)) == 4
    without = engine.run(run(source, "without", PROMPT, 4, routes_from=None))
    assert all(chunk.routes is None and chunk.prompt_routes is None for chunk in without)


def test_a_reader_that_is_late_gets_each_row_with_its_token(
    engine: Engine, source: AsyncLLMSource, loaded: Any
) -> None:
    """vLLM merges what waits for it, and leaves the routes of all but the last output out."""

    async def scenario() -> list[TokenChunk]:
        chunks = []
        request = EngineRequest("slow", array(TOKEN, [4, 5, 6]), {"max_tokens": 200, "ignore_eos": True}, routes_from=1)
        async for chunk in source.generate(request):
            chunks.append(chunk)
            await asyncio.sleep(0.02)
        return chunks

    chunks = engine.run(scenario())
    assert max(len(chunk.ids) for chunk in chunks) > 1, "nothing was merged"
    assert routes_of(chunks) == expected(loaded, [4, 5, 6, *ids_of(chunks)])


def test_a_commit_and_a_cut_leave_no_gap_and_no_token_with_two_routes(
    engine: Engine, source: AsyncLLMSource, loaded: Any
) -> None:
    """A commit has everything computed again; after a cut another replica does. Old tokens keep their rows."""

    async def scenario() -> tuple[list[TokenChunk], list[TokenChunk]]:
        running = RunningRequest(source, "cut", PROMPT, 900, routes_from=1)
        for version in (1, 2):
            await running.produced(len(running.column("ids")) + 30)
            await source.pause(PauseMode.KEEP)
            await source.commit(version)
            await source.resume()
        await running.produced(len(running.column("ids")) + 30)
        await source.pause(PauseMode.ABORT)
        await running.task
        await source.resume()
        whole = PROMPT + running.column("ids")
        return running.chunks, await run(source, "again", whole, 20, routes_from=len(whole))

    cut, again = engine.run(scenario())
    assert cut[-1].finish_reason is Finish.CUT and {chunk.version for chunk in cut if chunk.ids} == {0, 1, 2}
    ids = PROMPT + ids_of(cut)
    assert routes_of(cut) == expected(loaded, ids)
    assert routes_of(again) == expected(loaded, ids + ids_of(again), len(ids))
    assert len(routes_of(again)) == len(ids_of(again)), (
        "one row a token: the first is that of the last one before the cut"
    )


@pytest.mark.parametrize(
    "change", [lambda rows: rows.append(rows[-1][-1:]), lambda rows: rows.pop()], ids=["more", "fewer"]
)
def test_other_rows_than_tokens_are_given_to_none(engine: Engine, source: AsyncLLMSource, change: Any) -> None:
    """From the chunk on at which they are noticed, whichever token the row that is too much would have gone to."""

    async def scenario() -> list[TokenChunk]:
        chunks = []
        request = EngineRequest("other", array(TOKEN, [4, 5, 6]), {"max_tokens": 60, "ignore_eos": True}, routes_from=1)
        async for chunk in source.generate(request):
            chunks.append(chunk)
            if len(chunks) == 2:
                (state,) = engine.llm.output_processor.request_states.values()
                await asyncio.sleep(0.1)  # in which more tokens come
                change(state.routed_experts_chunks)
        return chunks

    chunks = engine.run(scenario())
    assert len(ids_of(chunks)) == 60
    assert all(chunk.routes is not None for chunk in chunks[:2])
    assert all(chunk.routes is None for chunk in chunks[2:] if chunk.ids)
