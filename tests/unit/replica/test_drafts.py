"""The proposer feeds its store with what an engine generates, and drafts as many tokens as are worth their place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from seamless_verl.config.roles import OWN_DRAFTS
from seamless_verl.replica.drafts import PROBE_EVERY, Acceptance, StepTimes, SuffixProposer, worthwhile
from seamless_verl.rollout.engine import FIRST_PROMPT, RESUMED_TOKENS
from seamless_verl.rollout.precedence import name_of
from seamless_verl.trajectory.records import tokens

PROMPT = [9, 8, 7, 6]
ANSWER = [1, 2, 3, 4, 5, 1, 3, 5, 2, 4]


class Engine:
    """What vLLM's runner shows a proposer of requests that begin, get tokens and end."""

    def __init__(self, most: int = 8, limit: int = 64, seqs: int = 64) -> None:
        self.requests: dict[str, Any] = {}
        self.tokens: dict[str, list[int]] = {}
        speculative = SimpleNamespace(num_speculative_tokens=most)
        self.proposer = SuffixProposer(
            SimpleNamespace(
                speculative_config=speculative,
                model_config=SimpleNamespace(max_model_len=limit),
                scheduler_config=SimpleNamespace(max_num_seqs=seqs),
            )
        )
        self.limit, self.input_batch = limit, SimpleNamespace(req_ids=[])
        self.proposer.runner = self

    def begin(
        self, name: str, prompt: list[int], max_tokens: int = 32, resumed: int = 0, first_prompt: str = ""
    ) -> None:
        extra = {RESUMED_TOKENS: resumed, FIRST_PROMPT: first_prompt} if resumed or first_prompt else None
        params = SimpleNamespace(extra_args=extra, max_tokens=max_tokens)
        self.requests[name] = SimpleNamespace(num_prompt_tokens=len(prompt), sampling_params=params)
        self.tokens[name] = list(prompt)

    def step(self, **brought: list[int]) -> dict[str, list[int]]:
        """The drafts after a step that brought these tokens."""
        self.input_batch.req_ids = list(brought)
        for name, new in brought.items():
            self.tokens[name] += new
        rows = np.zeros((len(brought), self.limit), np.int32)
        for row, name in zip(rows, brought, strict=True):
            row[: len(self.tokens[name])] = self.tokens[name]
        lengths = np.array([len(self.tokens[name]) for name in brought])
        drafts = self.proposer.propose(list(brought.values()), lengths, rows)
        return dict(zip(brought, drafts, strict=True))

    def end(self, name: str) -> None:
        del self.requests[name]


def trusting(engine: Engine) -> Engine:
    for one in engine.proposer.acceptances:
        one.accepted = 1e6
    engine.proposer.times.load = lambda tokens: 0.0  # type: ignore[method-assign]
    return engine


def test_a_second_sample_of_the_prompt_is_drafted_from_the_first_while_that_runs() -> None:
    engine = trusting(Engine())
    engine.begin("a", PROMPT)
    engine.begin("b", PROMPT)
    assert engine.step(a=ANSWER, b=[]) == {"a": [], "b": []}
    assert engine.step(b=ANSWER[:1])["b"] == ANSWER[1:4]  # as many as matched
    assert engine.step(b=ANSWER[1:5])["b"] == ANSWER[5:]
    engine.end("a")
    engine.step(b=[7])
    assert set(engine.proposer.calls) == {"b"}


def test_a_call_that_was_cut_goes_on_where_it_was() -> None:
    engine = trusting(Engine())
    engine.begin("a", PROMPT)
    engine.step(a=ANSWER)
    engine.begin("b", PROMPT + ANSWER[:4], resumed=4)
    assert engine.step(b=ANSWER[4:5])["b"] == ANSWER[5:10]


def test_a_later_turn_is_drafted_from_what_others_said_after_the_first_prompt() -> None:
    engine = trusting(Engine())
    engine.begin("a", PROMPT)
    engine.step(a=ANSWER)
    engine.begin("b", [*PROMPT, 2, 2, 2], first_prompt=name_of(tokens(PROMPT).tobytes()))
    assert engine.step(b=ANSWER[:2])["b"] == ANSWER[2:4] and engine.proposer.calls["b"].own


def test_nothing_is_drafted_beyond_the_last_token_of_a_call() -> None:
    engine = trusting(Engine())
    engine.begin("a", PROMPT)
    engine.step(a=ANSWER)
    engine.begin("b", PROMPT, max_tokens=4)
    assert engine.step(b=ANSWER[:2])["b"] == ANSWER[2:3]
    assert engine.step(b=ANSWER[2:3])["b"] == []
    full = trusting(Engine(limit=len(PROMPT) + 5))
    full.begin("a", PROMPT)
    full.step(a=ANSWER[:5])
    full.begin("b", PROMPT)
    assert full.step(b=ANSWER[:3])["b"] == ANSWER[3:4]


def test_a_proposer_without_its_runner_drafts_nothing() -> None:
    engine = Engine()
    engine.proposer.runner = None
    engine.begin("a", PROMPT)
    assert engine.step(a=ANSWER) == {"a": []}


def test_rejected_drafts_become_fewer_and_accepted_ones_more() -> None:
    good, bad, prior = Acceptance(), Acceptance(), Acceptance()
    child = Acceptance(prior)
    for _ in range(50):
        good.verified(4, 4)
        bad.verified(4, 0)
        child.verified(4, 4)
    assert bad.chance < 0.1 < 0.9 < good.chance and prior.chance == pytest.approx(good.chance)
    assert worthwhile(bad.chance, 0.5) == 0 < worthwhile(0.6, 0.5) < worthwhile(good.chance, 0.5)


def test_the_cost_of_a_draft_is_learned_from_the_times_of_steps() -> None:
    times = StepTimes()
    assert times.load(1) == times.load(64) == pytest.approx(0.5)
    for count in (1, 4, 2, 8, 3, 16) * 10:
        times.observe(count, 0.010 + 0.001 * count)
        times.observe(count, 5.0)  # the engine was paused
    assert times.load(1) == pytest.approx(1 / 11, rel=0.01) and times.load(90) == pytest.approx(0.9, rel=0.01)


def test_what_drafts_save_is_the_steps_that_are_not_made_less_their_own_time() -> None:
    times = StepTimes()
    assert times.saved(1, 8, 8) == 0.0, "no step was measured"
    for count in (1, 4, 2, 8, 3, 16) * 10:
        times.observe(count, 0.010 + 0.001 * count)
    assert times.saved(1, 4, 3) == pytest.approx(3 * 0.011 - 4 * 0.001, rel=0.01)
    assert times.saved(5, 4, 0) == pytest.approx(-4 * 0.001, rel=0.01)
    assert times.saved(5, 10, 5) == pytest.approx(0.015 - 10 * 0.001, rel=0.01)  # a step of five calls


def test_gains_count_accepted_tokens_by_where_they_came_from() -> None:
    engine = trusting(Engine())
    engine.proposer.times.parts = lambda: (0.010, 0.001)  # type: ignore[method-assign]
    engine.begin("a", PROMPT)
    engine.step(a=ANSWER)
    engine.begin("b", PROMPT)
    assert engine.step(b=ANSWER[:3])["b"] == ANSWER[3:8]
    engine.step(b=[*ANSWER[3:5], 7])
    gains = engine.proposer.gains
    assert (gains.of_prompt, gains.saved_s) == (2, pytest.approx(2 * 0.011 - 5 * 0.001))
    engine.begin("c", [5, 5, 5])
    drafted = engine.step(c=ANSWER[:2])["c"]
    assert drafted and not engine.proposer.calls["c"].own
    engine.step(c=[*drafted, 9])
    assert gains.of_prompt == 2 and gains.saved_s > 0.017 + 0.009


def test_the_setting_names_the_proposer() -> None:
    assert OWN_DRAFTS["model"] == f"{SuffixProposer.__module__}.{SuffixProposer.__qualname__}"


def test_a_call_whose_drafts_were_rejected_tries_one_from_time_to_time_where_steps_have_room() -> None:
    engine = trusting(Engine(limit=512))
    engine.begin("a", PROMPT, max_tokens=400)
    engine.step(a=ANSWER)
    for one in engine.proposer.calls["a"].acceptances:
        one.rejected = 1e6
    engine.proposer.times.load = lambda tokens: 0.4  # type: ignore[method-assign]
    drafts = [engine.step(a=[1, 2])["a"] for _ in range(2 * PROBE_EVERY)]
    assert [len(one) for one in drafts if one] == [1, 1]
    engine.proposer.times.load = lambda tokens: 0.9  # type: ignore[method-assign]
    assert not any(engine.step(a=[1, 2])["a"] for _ in range(2 * PROBE_EVERY))


def test_a_step_has_no_more_tokens_than_the_engine_has_room_for() -> None:
    engine = trusting(Engine(most=4, seqs=6))
    engine.begin("a", PROMPT)
    engine.step(a=ANSWER)
    names = ["b", "c", "d"]
    for name in names:
        engine.begin(name, PROMPT)
    drafts = engine.step(**{name: ANSWER[:3] for name in names})
    assert [len(drafts[name]) for name in names] == [3, 0, 0]
    for name in ["e", "f", "g"]:
        engine.begin(name, PROMPT)
    full = engine.step(**{name: ANSWER[3:4] for name in [*names, "e", "f", "g"]})
    assert not any(full.values())
