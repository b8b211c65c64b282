"""On a real engine, calls that are cut again and again within a grammar end as the grammar requires."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from support.hosts import VLLM
from support.vllm_engine import Engine, started

from seamless_verl.replica import scheduler
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.call import Call, Calls
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.tiny.tokenizer import END_OF_TURN, MARKUP_TOKENS, token_id
from seamless_verl.trajectory.records import Finish

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")]
WORDS = r"(ab|cde|abf){30}"  # after "ab" it matters what came before
THINKS = {"reasoning_ended": False, "reasoning_parser_kwargs": {"chat_template_kwargs": {"enable_thinking": True}}}
END_OF_THOUGHT = token_id("</think>")
BIAS = {token_id(token): -100.0 for token in (*MARKUP_TOKENS, END_OF_TURN)} | {END_OF_THOUGHT: 4.0}
AT_ONCE = {"reasoning_ended": True}
CASES: dict[str, dict[str, Any]] = {
    "at once": {"reasoning_ended": True},
    "after reasoning": {**THINKS, "logit_bias": BIAS},
}


@pytest.fixture(scope="module")
def engine(nano: Path) -> Iterator[Engine]:
    options = {
        "skip_tokenizer_init": False,
        "scheduler_cls": scheduler.SCHEDULER_CLS,
        "structured_outputs_config": {"reasoning_parser": "qwen3"},
    }
    with started(nano / "model", cores=sorted(os.sched_getaffinity(0)), devices=[0], **options) as engine:
        yield engine


def fleet_of(engine: Engine) -> Fleet:
    source, fleet = AsyncLLMSource(engine.llm, version=0), Fleet()
    fleet.commit(0)
    fleet.add("a", engine=source, control=source, capacity=4, version=0)
    return fleet


async def generated(
    engine: Engine, produced: bytes = b"", *, often: bool = True, **sampling: Any
) -> tuple[list[int], Finish | None, int]:
    """Ids, how it ended, and how often it was cut: after each of its chunks."""
    fleet, prompt = fleet_of(engine), array("i", [10, 20, 30])
    fields = {"max_tokens": 600, "structured_outputs": {"regex": WORDS}, **sampling}
    call = Call("one", prompt, fields, produced=array("i", list(produced)))
    ids, finish, cuts = list[int](), None, 0
    async with aclosing(Calls(fleet, grammars_resume=True).stream(call)) as chunks:
        async for chunk in chunks:
            ids.extend(chunk.ids)
            finish = chunk.finish_reason
            if finish is None and often:
                await fleet.pause(["a"], PauseMode.ABORT)
                await fleet.resume(["a"])
                cuts += 1
    return ids, finish, cuts


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", CASES)
def test_a_grammar_resumes_where_it_was_cut(engine: Engine, case: str, seed: int) -> None:
    ids, finish, cuts = engine.run(generated(engine, seed=seed, **CASES[case]))
    assert (finish, ids[-1]) == (Finish.STOP, token_id(END_OF_TURN))
    assert cuts >= 8  # a slow reader has several tokens in a chunk
    reply = ids[ids.index(END_OF_THOUGHT) + 1 : -1] if END_OF_THOUGHT in ids else ids[:-1]
    assert (END_OF_THOUGHT in ids) == (case == "after reasoning")
    assert re.fullmatch(WORDS, bytes(reply).decode()), reply


def test_tokens_of_an_earlier_process_count(engine: Engine) -> None:
    ids, finish, _ = engine.run(generated(engine, b"abfab", often=False, **AT_ONCE))
    assert finish is Finish.STOP and re.fullmatch(WORDS, (b"abfab" + bytes(ids[:-1])).decode())


def test_tokens_that_the_grammar_does_not_allow_fail_the_call_but_not_the_engine(engine: Engine) -> None:
    ids, finish, _ = engine.run(generated(engine, b"abx", **AT_ONCE))
    assert finish is Finish.FAILED and len(ids) <= (VLLM == "0.24"), "0.24 rejects the first token"
    assert engine.run(generated(engine, often=False, **AT_ONCE))[1] is Finish.STOP


def test_the_end_of_a_reasoning_is_found_at_once() -> None:
    """Asked about each of these tokens, this parser would take seconds."""
    asked = list[int]()

    class Reasoner:
        def is_reasoning_end_streaming(self, ids: list[int], delta: list[int]) -> bool:
            asked.append(len(ids))
            return 7 in delta

    ids = [1] * 2000 + [2] * 6000 + [7] + [3] * 100
    assert scheduler.reasoning_end(Reasoner(), ids, 2000, end_tokens={7, 9}) == 8001 and len(asked) == 1
    assert scheduler.reasoning_end(Reasoner(), ids, 2000, end_tokens=set()) == 8001 and len(asked) == 6002
