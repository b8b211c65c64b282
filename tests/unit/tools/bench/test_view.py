"""The figures of the view's bench."""

from __future__ import annotations

import pytest

from seamless_verl.tools.bench.view import ViewRun, in_pairs, rate_of, text_of
from seamless_verl.tools.compare.running import Step


def step(number: int, at: float, tokens: int) -> Step:
    data = {"perf/total_num_tokens": tokens, "response_length/mean": 30.0, "prompt_length/mean": 10.0}
    return {"step": number, "at": at, "data": data}


def test_the_rate_is_of_what_comes_after_the_first_steps() -> None:
    steps = [step(0, 1.0, 0), step(1, 10.0, 8000), step(2, 14.0, 800), step(3, 16.0, 400)]
    assert rate_of(steps, 1) == pytest.approx(0.75 * 1200 / 6)


def test_pairs_begin_with_either() -> None:
    assert list(in_pairs(2)) == [(1, False), (1, True), (2, True), (2, False)]


def test_the_ratio_is_pair_by_pair() -> None:
    rates = {(1, False): 100.0, (1, True): 99.0, (2, True): 210.0, (2, False): 200.0}
    runs = [ViewRun(number, viewed, rates[number, viewed], 0.004, 9) for number, viewed in in_pairs(2)]
    text = text_of(runs)
    assert "over tokens/s without: 1.020 (0.990 to 1.050); the view's process took 0.40% of the cores' time" in text
    assert [line.split()[:3] for line in text.splitlines()[1:3]] == [["1", "alone", "100"], ["1", "viewed", "99"]]
