"""On a real engine, the recorded logprob is the model's own whatever constrained the sampling, and tokens of a grammar
are labelled."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vllm_engine import Engine, started

from seamless_verl.replica import scheduler
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.replica.worker_extension import check_replies, extension_name
from seamless_verl.rollout.engine import EngineRequest
from seamless_verl.tiny.tokenizer import END_OF_TURN, token_id
from seamless_verl.trajectory.records import Finish, Grammar, TokenChunk, merge_chunks

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")]
PROMPT = [104, 105, 32, 116, 104, 101, 114, 101]
WORDS = ["ab", "cde", "abf"]
COUNT = 4
REGEX = {"structured_outputs": {"regex": f"({'|'.join(WORDS)}){{{COUNT}}}"}, "ignore_eos": False}
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
JSON = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 40, "ignore_eos": False}
BIAS = {97: 5.0, 98: -5.0, 33: 3.0}
ALTERED: dict[str, dict[str, Any]] = {
    "regex": REGEX,
    "regex, likeliest tokens": {**REGEX, "logprobs": 3},
    "json": JSON,
    "regex, warm, few": {**REGEX, "temperature": 1.7, "top_p": 0.8},
    "top_p": {"top_p": 0.3},
    "top_k": {"top_k": 5, "temperature": 0.8},
    "min_p": {"min_p": 0.6},
    "logit_bias": {"logit_bias": BIAS},
    "allowed_token_ids": {"allowed_token_ids": [65, 66, 67]},
    "bad_words": {"bad_words": [chr(code) for code in range(33, 127)]},
    "min_tokens": {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": list(range(40, 250))},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
    "repetition_penalty": {"repetition_penalty": 1.8, "max_tokens": 200},  # so many that some repeat, whatever is drawn
}
PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "likeliest tokens": {"logprobs": 4},
    "cold": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
}
CASES = PLAIN | ALTERED
GRAMMARS = {name for name, fields in CASES.items() if "structured_outputs" in fields}
WITHOUT_DRAFTS = {"min_p", "logit_bias"}  # which vLLM refuses on an engine that drafts
SAME = 2e-4  # of fp32 computations in another order
ENGINES: dict[str, dict[str, Any]] = {
    "processed": {"logprobs_mode": "processed_logprobs", "async_scheduling": True},
    "raw, drafts": {
        "logprobs_mode": "raw_logprobs",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
    },
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(nano: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = {
        "skip_tokenizer_init": False,
        "scheduler_cls": scheduler.SCHEDULER_CLS,
        "worker_extension_cls": extension_name(),
        **ENGINES[request.param],
    }
    cores = sorted(os.sched_getaffinity(0))
    with started(nano / "model", cores=cores, devices=[len(cores) - 1], **options) as engine:
        yield engine


def cases(engine: Engine) -> list[str]:
    drafts = engine.llm.vllm_config.speculative_config is not None
    return [name for name in CASES if not (drafts and name in WITHOUT_DRAFTS)]


async def generated(source: AsyncLLMSource, name: str) -> TokenChunk:
    fields = {"temperature": 1.0, "max_tokens": 24, "seed": 3, "ignore_eos": True, **CASES[name]}
    request = EngineRequest(f"{name}, {source.own_logprobs}", array("i", PROMPT), fields)
    return merge_chunks([chunk async for chunk in source.generate(request)])


async def all_generated(source: AsyncLLMSource, names: list[str]) -> dict[str, TokenChunk]:
    """Of all cases, which share the engine's batches."""
    chunks = await asyncio.gather(*(generated(source, name) for name in names))
    outcomes = dict(zip(names, chunks, strict=True))
    failed = {name: chunk.stop_reason for name, chunk in outcomes.items() if chunk.finish_reason is Finish.FAILED}
    assert not failed and all(chunk.ids for chunk in chunks)
    return outcomes


@pytest.fixture(scope="module")
def vllms(engine: Engine) -> dict[str, TokenChunk]:
    """What vLLM records by itself."""
    return engine.run(all_generated(AsyncLLMSource(engine.llm, version=0), cases(engine)))


@pytest.fixture(scope="module")
def ours(engine: Engine, vllms: dict[str, TokenChunk]) -> dict[str, TokenChunk]:
    for _ in range(2):  # a data plane that was restarted asks again
        assert check_replies(engine.run(engine.llm.collective_rpc("record_own_logprobs"))) == [True]
    source = AsyncLLMSource(engine.llm, version=0, own_logprobs=True)
    return engine.run(all_generated(source, cases(engine)))


@pytest.fixture(scope="module")
def model(nano: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)


def expected(model: Any, name: str, chunk: TokenChunk) -> torch.Tensor:
    """What the trainer computes: log_softmax(logits / temperature) [tokens, vocabulary]."""
    ids = torch.tensor([[*PROMPT, *chunk.ids]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1]
    return (logits / (CASES[name].get("temperature", 1.0) or 1.0)).log_softmax(-1)


def largest_difference(model: Any, name: str, chunk: TokenChunk) -> float:
    own = expected(model, name, chunk).gather(1, torch.tensor(chunk.ids.tolist())[:, None])[:, 0]
    return (own - torch.tensor(chunk.logprobs)).abs().max().item()


def test_the_recorded_logprob_is_the_models_own(model: Any, ours: dict[str, TokenChunk]) -> None:
    differences = {name: largest_difference(model, name, chunk) for name, chunk in ours.items()}
    assert len(ours) >= len(CASES) - len(WITHOUT_DRAFTS) and max(differences.values()) < SAME, differences


def test_vllms_are_not(engine: Engine, model: Any, vllms: dict[str, TokenChunk]) -> None:
    """Without a recorder; so each of these cases would fail above."""
    differences = {name: largest_difference(model, name, chunk) for name, chunk in vllms.items()}
    wrong = {name for name, difference in differences.items() if not difference < 100 * SAME}
    raw = engine.llm.model_config.logprobs_mode == "raw_logprobs"
    assert wrong == (GRAMMARS | {"cold", "top_k"} if raw else set(ALTERED)), differences  # their temperatures are not 1


@pytest.mark.parametrize("name", [name for name in CASES if "likeliest" in name])
def test_the_likeliest_tokens_are_the_models_own(model: Any, ours: dict[str, TokenChunk], name: str) -> None:
    chunk, wanted = ours[name], CASES[name]["logprobs"]
    assert chunk.top is not None
    for row, sampled, entry in zip(expected(model, name, chunk), chunk.ids, chunk.top, strict=True):
        likelier, as_likely = row > row[sampled] + SAME, row >= row[sampled] - SAME  # of a nearly uniform distribution
        assert 1 + int(likelier.sum()) <= entry.rank <= int(as_likely.sum())
        assert len(entry.ids) == wanted + (entry.rank > wanted)
        assert sampled in entry.ids
        assert torch.allclose(torch.tensor(entry.logprobs), row[list(entry.ids)], atol=SAME)
        assert torch.allclose(torch.tensor(entry.logprobs[:wanted]), row.topk(wanted).values, atol=SAME)


@cache
def sentences() -> list[bytes]:
    return ["".join(words).encode() for words in product(WORDS, repeat=COUNT)]


def label(prefix: bytes) -> Grammar:
    """Of the token after a prefix of the regex's sentences."""
    nexts = {sentence[len(prefix) : len(prefix) + 1] for sentence in sentences() if sentence.startswith(prefix)}
    return Grammar.FORCED if len(nexts) == 1 else Grammar.CHOSEN


@pytest.mark.parametrize("name", sorted(GRAMMARS - {"json"}))
def test_forced_tokens_are_labelled(ours: dict[str, TokenChunk], name: str) -> None:
    chunk = ours[name]
    reply = bytes(chunk.ids[:-1].tolist())
    assert chunk.ids[-1] == token_id(END_OF_TURN) and chunk.grammar[-1]
    assert list(chunk.grammar[:-1]) == [label(reply[:i]) for i in range(len(reply))]
    assert {Grammar.FORCED, Grammar.CHOSEN} == set(chunk.grammar)


def test_only_tokens_under_a_grammar_are_labelled(ours: dict[str, TokenChunk]) -> None:
    assert Grammar.NONE not in ours["json"].grammar and len(ours["json"].grammar) == len(ours["json"].ids)
    assert {name for name, chunk in ours.items() if chunk.grammar} == GRAMMARS
