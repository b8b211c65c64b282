"""Through the gateway, on a real engine: the logprobs of replies under a grammar agree with a forward pass of the same
weights as well as those of plain replies do, also when their calls were cut; and what is trained of them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from support.conformance_server import MAX_RUNNING, MODEL, gateway_over
from support.hosts import VLLM
from support.vllm_engine import started

from seamless_verl.journal import JournalReader, StoredCall
from seamless_verl.replica import scheduler
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.replica.worker_extension import check_replies, extension_name
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.tiny.tokenizer import token_id
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.policies import GrammarTokens, TrainAll
from seamless_verl.trajectory.records import Grammar
from seamless_verl.trajectory.sequences import assemble
from seamless_verl.trajectory.session import SessionRecord

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")]
ARGUMENTS = {
    "type": "object",
    "properties": {"unit": {"enum": ["m", "km"]}, "count": {"type": "integer"}},
    "required": ["unit", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "measure", "parameters": ARGUMENTS, "strict": True}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "m", "schema": ARGUMENTS, "strict": True}}
# The parser of vLLM 0.24 takes a reply for thoughts until they end, which an untrained model does by chance alone.
ENDS_THOUGHTS = {"logit_bias": {str(token_id("</think>")): 9}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    # an untrained model calls no tool by itself
    "strict tools": {"tools": [TOOL], "logit_bias": {str(token_id("<tool_call>")): 9}},
    "required tool": {"tools": [TOOL], "tool_choice": "required", **ENDS_THOUGHTS},
    "json schema": {"response_format": SCHEMA, **ENDS_THOUGHTS},
}
CALLS, CUTS, MOST = 6, 6, 64
THOUGHTS_END = (token_id("</think>"), token_id("<tool_call>"))
SAME = 2e-4  # of fp32 computations in another order
KEEP_ENGINE = {"skip_tokenizer_init": False, "reasoning_parser": "qwen3", "scheduler_cls": scheduler.SCHEDULER_CLS}


async def record(llm: Any, model: Path, journal: Path) -> tuple[dict[str, str], int]:
    """Session ids of replies of each kind, all at once, and how many requests were cut meanwhile."""
    check_replies(await llm.collective_rpc("record_own_logprobs"))
    source = AsyncLLMSource(llm, version=0, own_logprobs=True)
    cut, slots = 0, asyncio.Semaphore(MAX_RUNNING)  # the gateway refuses more at once
    async with gateway_over(source, model, journal, grammars_resume=True) as (gateway, _, fleet):
        sessions = {kind: await gateway.admin.open({"uid": kind, "metadata": {"session": "0"}}) for kind in KINDS}
        clients = {
            kind: openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=session["key"], max_retries=0)
            for kind, session in sessions.items()
        }
        replies = [
            asyncio.create_task(reply(clients[kind], slots, number, **options))
            for kind, options in KINDS.items()
            for number in range(CALLS)
        ]
        while not all(one.done() for one in replies) and cut < CUTS * len(replies):
            await asyncio.sleep(0.05)  # the time that the engine has between two cuts
            cut += len(source.in_flight)
            await fleet.pause(["replica-0"], PauseMode.ABORT)
            await fleet.resume(["replica-0"])
        await asyncio.gather(*replies)
        for client in clients.values():
            await client.close()
        for session in sessions.values():
            await gateway.admin.close(session["session_id"], "finished")
    return {kind: session["session_id"] for kind, session in sessions.items()}, cut


async def reply(client: openai.AsyncOpenAI, slots: asyncio.Semaphore, number: int, **options: Any) -> None:
    messages = [{"role": "user", "content": f"measure {number}"}]
    async with slots:
        await client.chat.completions.create(
            model=MODEL, messages=messages, seed=number, max_tokens=MOST, **options, timeout=120
        )


@pytest.fixture(scope="module")
def recorded(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[StoredCall, ...]]]:
    """The calls of each kind as the journal has them."""
    journal = tmp_path_factory.mktemp("journal") / "journal.sqlite"
    cores = sorted(os.sched_getaffinity(0))
    options = {**KEEP_ENGINE, "worker_extension_cls": extension_name(), "logprobs_mode": "processed_logprobs"}
    with started(nano / "model", cores=cores, devices=[len(cores) - 1], **options) as engine:
        sessions, cut = engine.run(record(engine.llm, nano / "model", journal))
    assert cut >= len(KINDS)
    found = {kind: JournalReader(journal).read(session_id) for kind, session_id in sessions.items()}
    yield {kind: tuple(session.calls) for kind, session in found.items() if session is not None}


@pytest.fixture(scope="module")
def model(nano: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32)


def labels(calls: tuple[StoredCall, ...]) -> list[int]:
    return [label for call in calls for segment in call.segments for label in (segment.grammar or bytes(len(segment)))]


def columns(model: Any, calls: tuple[StoredCall, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The logprobs of the model, and those on record."""
    own, recorded = list[torch.Tensor](), list[float]()
    for call in calls:
        ids = call.turn().generated_ids.tolist()
        with torch.no_grad():
            logits = model(torch.tensor([[*call.prompt_ids, *ids]])).logits[0, len(call.prompt_ids) - 1 : -1]
        own.append(logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0])
        recorded += [value for segment in call.segments for value in segment.logprobs]
    return torch.cat(own), torch.tensor(recorded)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_logprobs_agree_with_a_forward_pass(
    model: Any, recorded: dict[str, tuple[StoredCall, ...]], kind: str
) -> None:
    own, found = columns(model, recorded[kind])
    assert len(recorded[kind]) == CALLS and len(own) > 100
    difference = (own - found).abs().max().item()
    correlation = np.corrcoef(own.exp(), found.exp())[0, 1]
    print(f"{kind}: {len(own)} tokens, difference {difference:.2e}, correlation {correlation:.7f}")  # noqa: T201
    assert difference < SAME and correlation > 0.9999


def test_tokens_of_grammars_are_labelled_in_the_journal(recorded: dict[str, tuple[StoredCall, ...]]) -> None:
    both = {Grammar.CHOSEN, Grammar.FORCED}
    assert set(labels(recorded["plain"])) == {Grammar.NONE} and both <= set(labels(recorded["strict tools"]))
    for kind in ("json schema", "required tool"):
        under = list[int]()
        for call in recorded[kind]:
            found, begin = labels((call,)), thoughts_of(call)
            assert set(found[:begin]) <= {Grammar.NONE}, "vLLM applies no grammar to thoughts"
            under += found[begin:]
        assert set(under) == both, kind


def thoughts_of(call: StoredCall) -> int:
    """How many tokens of a reply are thoughts. The parser of vLLM 0.24 takes it for thoughts from its beginning."""
    ids = call.turn().generated_ids.tolist()
    ends = [ids.index(end) + 1 for end in THOUGHTS_END if end in ids]
    return min(ends, default=len(ids)) if VLLM == "0.24" else 0


@pytest.mark.parametrize("kind", KINDS)
def test_forced_tokens_are_dropped_with_that_reason(recorded: dict[str, tuple[StoredCall, ...]], kind: str) -> None:
    session = SessionRecord("u", kind)
    for call in recorded[kind]:
        session.add_turn(call.turn())
    found = labels(recorded[kind])
    last = [call.segments[-1].grammar[-1:] for call in recorded[kind]]
    accounts = {policy: assemble(session, TrainAll(), 0, grammar=policy).account for policy in GrammarTokens}
    assert all(account.generated == len(found) for account in accounts.values())
    assert accounts[GrammarTokens.TRAIN_ALL].dropped == {}
    masked = accounts[GrammarTokens.MASK_FORCED].dropped
    assert sum(masked.values()) == masked.get(DropReason.FORCED, 0)
    forced = found.count(Grammar.FORCED)  # the last of a response is trained all the same
    assert forced - last.count(bytes([Grammar.FORCED])) <= masked.get(DropReason.FORCED, 0) <= forced
    assert accounts[GrammarTokens.MASK_ALL].trained <= accounts[GrammarTokens.MASK_FORCED].trained
