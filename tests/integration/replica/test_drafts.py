"""On a real engine, drafts of what was generated before are accepted, and change neither tokens nor logprobs nor what a
pause, a cut and a commit do; sampled tokens have the model's distribution. SEAMLESS_DRAWS draws more of them."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine_requests import RunningRequest
from support.vllm_engine import Engine, redrawn, started

from seamless_verl.config.roles import OWN_DRAFTS
from seamless_verl.replica import scheduler
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.replica.worker_extension import check_replies, extension_name
from seamless_verl.rollout.engine import PauseMode
from seamless_verl.rollout.precedence import name_of
from seamless_verl.rollout.shared_samples import SharedSample
from seamless_verl.trajectory.records import Finish

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")]
PROMPTS = [[104, 105, 32, 116, 104, 101, 114, 101], [115, 117, 109, 32, 49], [97, 98, 99, 97, 98, 99], [120, 33, 87]]
SAME = 2e-4  # of fp32 computations in another order
LENGTH = 120
DRAWS = int(os.environ.get("SEAMLESS_DRAWS", "3000"))
SETTINGS: dict[str, dict[str, Any]] = {
    "cold": {"temperature": 0.4},
    "top_p": {"temperature": 0.7, "top_p": 0.6},
    "top_k": {"temperature": 0.7, "top_k": 6},
}


@pytest.fixture(scope="module")
def weights(nano: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model that prefers some tokens to others, as one that learned does, and what makes it of the small one's."""
    from transformers import AutoModelForCausalLM

    return redrawn(AutoModelForCausalLM.from_pretrained(nano / "model", dtype=torch.float32), seed=5)


@pytest.fixture(scope="module")
def engine(nano: Path, weights: tuple[Any, dict[str, torch.Tensor]]) -> Iterator[Engine]:
    options = {
        "scheduler_cls": scheduler.SCHEDULER_CLS,
        "worker_extension_cls": extension_name(),
        "logprobs_mode": "processed_logprobs",
        "speculative_config": OWN_DRAFTS,
    }
    cores = sorted(os.sched_getaffinity(0))
    with started(nano / "model", cores=cores, devices=[len(cores) - 1], **options) as engine:
        engine.run(engine.update(weights[1], bucket_mb=64))
        yield engine


@pytest.fixture(scope="module")
def counts(engine: Engine) -> scheduler.EngineCounts:
    return scheduler.EngineCounts(engine.llm)


@pytest.fixture(scope="module")
def source(engine: Engine, counts: scheduler.EngineCounts) -> AsyncLLMSource:
    """Its first calls come before the proposer knows its runner, and have no drafts."""
    return AsyncLLMSource(engine.llm, version=0, own_logprobs=True)


async def generated(source: AsyncLLMSource, name: str, prompt: list[int], tokens: int, **fields: Any) -> RunningRequest:
    call = RunningRequest(source, name, prompt, tokens, **{"temperature": 0.0, **fields})
    await call.task
    return call


@pytest.fixture(scope="module")
def without(engine: Engine, source: AsyncLLMSource, counts: scheduler.EngineCounts) -> list[RunningRequest]:
    calls = [engine.run(generated(source, f"without {i}", prompt, LENGTH)) for i, prompt in enumerate(PROMPTS)]
    assert counts.drafted == 0
    return calls


@pytest.fixture(scope="module")
def drafting(engine: Engine, without: list[RunningRequest]) -> Engine:
    """From here on as many drafts are made as match, whatever a step costs on this machine."""

    def draft_all(worker: Any) -> None:
        worker.model_runner.drafter.times.load = lambda tokens: 0.0

    assert check_replies(engine.run(engine.llm.collective_rpc("record_own_logprobs"))) == [True]
    engine.run(engine.llm.collective_rpc(draft_all))
    return engine


def test_greedy_tokens_are_those_without_drafts_and_most_are_drafted(
    drafting: Engine, source: AsyncLLMSource, counts: scheduler.EngineCounts, without: list[RunningRequest]
) -> None:
    async def all_twice() -> list[list[RunningRequest]]:
        first = [await generated(source, f"first {i}", prompt, LENGTH) for i, prompt in enumerate(PROMPTS[:-1])]
        again = [generated(source, f"second {i}", prompt, LENGTH) for i, prompt in enumerate(PROMPTS[:-1])]
        return [first, list(await asyncio.gather(*again))]

    for calls in drafting.run(all_twice()):
        for call, plain in zip(calls, without[:-1], strict=True):
            assert call.finish is Finish.LENGTH and call.column("ids") == plain.column("ids")
            logprobs = torch.tensor(call.column("logprobs"))
            assert torch.allclose(logprobs, torch.tensor(plain.column("logprobs")), atol=SAME)
    assert counts.accepted > (len(PROMPTS) - 1) * LENGTH / 2, (counts.drafted, counts.accepted)


def test_a_call_that_is_paused_and_one_that_is_cut_go_on_with_drafts(
    drafting: Engine, source: AsyncLLMSource, without: list[RunningRequest]
) -> None:
    async def interrupted() -> None:
        running = [RunningRequest(source, f"cut {i}", PROMPTS[i], LENGTH, temperature=0.0) for i in (0, 1)]
        await asyncio.gather(*(call.produced(20) for call in running))
        await source.pause(PauseMode.KEEP)
        await source.resume()
        await source.abort("cut 1")
        await asyncio.gather(*(call.task for call in running))
        begun = running[1].column("ids")
        rest = await generated(source, "rest", [*PROMPTS[1], *begun], LENGTH - len(begun))
        assert running[0].column("ids") == without[0].column("ids")
        assert [*begun, *rest.column("ids")] == without[1].column("ids") and 20 <= len(begun) < LENGTH

    drafting.run(interrupted())


def test_beside_a_call_to_the_end_of_the_model_s_length_no_other_is_given_zeros(
    drafting: Engine, source: AsyncLLMSource, counts: scheduler.EngineCounts
) -> None:
    """vLLM by itself verifies 16 zeros a step in the place of drafts, for each call of the batch."""
    limit, most = drafting.llm.model_config.max_model_len, OWN_DRAFTS["num_speculative_tokens"]
    prompt, drafted = [7 + i % 200 for i in range(limit - 2 * most)], counts.drafted

    async def together() -> list[RunningRequest]:
        asked = {"to the end": prompt, "beside it": [9, 8, 7]}
        calls = (generated(source, name, ids, 2 * most, temperature=2.0) for name, ids in asked.items())
        return await asyncio.gather(*calls)

    for call in drafting.run(together()):
        assert len(call.column("ids")) == 2 * most and call.finish is Finish.LENGTH
    assert counts.drafted - drafted < most * most / 2


def test_samples_of_other_replicas_are_drafted_from(
    drafting: Engine, source: AsyncLLMSource, without: list[RunningRequest]
) -> None:
    """The last prompt's tokens came before the proposer knew its runner, as if from another engine."""
    ids, prompt = array("i", without[-1].column("ids")), array("i", PROMPTS[-1])
    sample = SharedSample(name_of(prompt.tobytes()), prompt[-4:], ids)
    check_replies(drafting.run(drafting.llm.collective_rpc("learn", args=(pickle.dumps([sample]),))))
    call = drafting.run(generated(source, "learned", PROMPTS[-1], LENGTH))
    assert call.column("ids") == ids.tolist()
    assert len(call.chunks) < LENGTH / 8, "all is drafted, from the first token on"


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_tokens_have_the_models_distribution(
    drafting: Engine, source: AsyncLLMSource, counts: scheduler.EngineCounts, weights: Any, name: str
) -> None:
    """The second of two tokens, by Pearson's statistic against the model's own distribution after the first.

    Where that is as large as in one of 1,000 runs, four times as many draws decide: chance does not stay so.
    """
    fields = SETTINGS[name]

    async def draws(number: int) -> list[list[int]]:
        found: list[RunningRequest] = []
        for begin in range(0, number, 100):
            names = [f"{name} {number} {begin + i}" for i in range(100)]
            calls = (generated(source, one, PROMPTS[0], 3, **fields, seed=None) for one in names)
            found += await asyncio.gather(*calls)
        return [call.column("ids") for call in found]

    before = counts.drafted, counts.accepted
    statistic, cells = pearson(weights[0], drafting.run(draws(DRAWS)), fields)
    drafted, accepted = counts.drafted - before[0], counts.accepted - before[1]
    assert 0 < accepted < drafted, "some drafts were accepted, and some rejected"
    if statistic >= quantile(len(cells) - 1):
        statistic, cells = pearson(weights[0], drafting.run(draws(4 * DRAWS)), fields)
    sys.stdout.write(f"{name}: {DRAWS} draws, {accepted} of {drafted} drafts, {statistic:.1f} of {len(cells)} cells\n")
    assert len(cells) > 2 and statistic < quantile(len(cells) - 1), (statistic, cells)


def pearson(model: Any, drawn: list[list[int]], fields: dict[str, Any]) -> tuple[float, list[tuple[float, int]]]:
    """The statistic of the second tokens after the most frequent first one, and each cell's expected and found count;
    tokens that are expected less than five times share one."""
    pairs = Counter((ids[0], ids[1]) for ids in drawn)
    first, _ = Counter(ids[0] for ids in drawn).most_common(1)[0]
    seen = {second: count for (begin, second), count in pairs.items() if begin == first}
    expected = allowed(model, [*PROMPTS[0], first], fields) * sum(seen.values())
    common = [token for token in range(len(expected)) if expected[token] >= 5]
    rare = float(expected.sum() - expected[common].sum()), sum(n for token, n in seen.items() if token not in common)
    cells = [(float(expected[token]), seen.get(token, 0)) for token in common] + ([rare] if rare[0] >= 5 else [])
    assert rare[0] > 0 or rare[1] == 0, "tokens that are not allowed"
    return sum((count - mean) ** 2 / mean for mean, count in cells), cells


def allowed(model: Any, ids: list[int], fields: dict[str, Any]) -> torch.Tensor:
    """The probabilities [vocabulary] of the next token by the sampling parameters."""
    with torch.no_grad():
        probabilities = (model(torch.tensor([ids])).logits[0, -1] / fields["temperature"]).softmax(-1)
    order = probabilities.argsort(descending=True)
    kept = order[: fields.get("top_k", len(order))]
    if "top_p" in fields:
        kept = kept[probabilities[kept].cumsum(-1) - probabilities[kept] < fields["top_p"]]
    result = torch.zeros_like(probabilities)
    result[kept] = probabilities[kept]
    return result / result.sum()


def quantile(freedom: int) -> float:
    """The statistic that is passed in one of 1,000 runs (Wilson and Hilferty)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3)


def test_tokens_after_a_commit_are_the_new_weights_own(
    drafting: Engine, source: AsyncLLMSource, counts: scheduler.EngineCounts, weights: tuple[Any, Any]
) -> None:
    """The last test: the weights are others from here on. What was generated before is no more than proposed."""
    model, changed = redrawn(weights[0], seed=11)

    async def committed() -> list[RunningRequest]:
        running = RunningRequest(source, "commit", PROMPTS[0], LENGTH, temperature=0.0)
        await running.produced(20)
        await source.pause(PauseMode.KEEP)
        await drafting.update(changed, bucket_mb=64, caches=False)
        await source.commit(1)
        await source.resume()
        await running.task
        return [running, await generated(source, "after", PROMPTS[0], LENGTH)]

    running, after = drafting.run(committed())
    for call, begin in ((running, running.column("version").index(1)), (after, 0)):
        ids = torch.tensor([[*PROMPTS[0], *call.column("ids")]])
        with torch.no_grad():
            rows = model(ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)[begin:]
        assert rows.argmax(-1).tolist() == call.column("ids")[begin:]
        own, recorded = rows.max(-1).values, torch.tensor(call.column("logprobs")[begin:])
        assert torch.allclose(own, recorded, atol=SAME)
    assert set(running.column("version")) == {0, 1} and set(after.column("version")) == {1}
