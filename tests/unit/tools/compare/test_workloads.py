"""Forced lengths: the same at the same place whatever is asked before, distributed as a workload says."""

from __future__ import annotations

import math
from statistics import fmean, median, stdev

import pytest

from seamless_verl.tools.compare.workloads import WORKLOADS, Workload

EVERY = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=list(WORKLOADS))


def lengths(workload: Workload, prompts: int = 1000) -> list[int]:
    samples = (workload.sample(index, session) for index in range(prompts) for session in range(workload.samples))
    return [turn.tokens for turns in samples for turn in turns]


@EVERY
def test_a_length_depends_on_its_place_alone(workload: Workload) -> None:
    drawn = workload.sample(7, 2)
    lengths(workload, 10)
    assert workload.sample(7, 2) == drawn
    places = {(index, session): tuple(workload.sample(index, session)) for index in range(30) for session in range(4)}
    assert len(set(places.values())) > 50  # neither the prompt nor the sample is left out of the seed
    assert len({turn.tokens for turn in workload.sample(0, 0)}) == workload.turns


def test_the_draws_are_those_of_earlier_reports() -> None:
    """Figures of different days compare only while these stay."""
    drawn = {name: [turn.tokens for turn in workload.sample(3, 1)] for name, workload in WORKLOADS.items()}
    later = {"agents": [26, 59, 32, 26], "alone": [69]}
    assert drawn == {"w1": [78], "w2": [84], "w2_heavy": [46], "w3": [36, 42, 101, 123], **later}


@EVERY
def test_lengths_are_lognormal_as_specified(workload: Workload) -> None:
    drawn = lengths(workload)
    uncut = [length for length in drawn if length < workload.longest]
    assert median(drawn) == pytest.approx(workload.tokens.median, rel=0.05)
    assert 0.95 < stdev(map(math.log, uncut)) / workload.tokens.sigma < 1.05
    assert min(drawn) >= 1 and max(drawn) <= workload.longest
    assert len(uncut) > 0.99 * len(drawn)  # the cap is no second peak


def test_the_long_tail_reaches_its_cap_and_the_even_one_does_not() -> None:
    assert max(lengths(WORKLOADS["w2"])) == WORKLOADS["w2"].longest == 1792
    assert max(lengths(WORKLOADS["w1"])) < WORKLOADS["w1"].longest


def test_tools_wait_between_turns_for_as_long_as_specified() -> None:
    workload = WORKLOADS["w3"]
    samples = [workload.sample(index, session) for index in range(1000) for session in range(4)]
    assert all([turn.tool_tokens for turn in turns] == [16, 16, 16, 0] for turns in samples)
    assert all(turns[-1].wait_s == 0 for turns in samples)
    waits = [turn.wait_s for turns in samples for turn in turns[:-1]]
    assert workload.tool is not None
    assert fmean(waits) == pytest.approx(workload.tool.mean, rel=0.03)
    assert all(turn.wait_s == 0 for turn in WORKLOADS["w2"].sample(0, 0))


def test_a_tool_takes_as_long_as_a_turn_of_an_engine_with_its_share_of_a_step() -> None:
    w1, w3 = WORKLOADS["w1"], WORKLOADS["w3"]
    rates = {32: 4000.0, 64: 6000.0}
    assert w3.turn_s(rates) == round(w3.tokens.mean * 32 / 4000, 3)
    slower = w3.with_turn(2.0)
    assert slower.tool is not None and slower.tool.mean == pytest.approx(2.0)
    assert [t.tokens for t in slower.sample(5, 1)] == [t.tokens for t in w3.sample(5, 1)]
    waits = [turn.wait_s for index in range(1000) for turn in slower.sample(index, 0)[:-1]]
    assert fmean(waits) == pytest.approx(2.0, rel=0.05)
    assert w1.with_turn(2.0) == w1


@EVERY
def test_the_longest_sample_fits_a_response(workload: Workload) -> None:
    for index in range(500):
        turns = workload.sample(index, 0)
        assert sum(turn.tokens + turn.tool_tokens for turn in turns) <= workload.response_tokens
    assert workload.step_samples == workload.seats == 64
