"""The lengths that were drawn and trained: which prompts are compared, and how far apart they are."""

from __future__ import annotations

import pytest

from seamless_verl.runtime.sample_lengths import RecordedLengths
from seamless_verl.tools.compare import lengths
from seamless_verl.tools.compare.lengths import length_bias, permutation_p, sample_rows


def test_a_run_that_trains_in_the_order_of_the_draw_has_no_bias() -> None:
    found = length_bias(RecordedLengths(4, {0: (10, 20), 1: (30, 40), 2: (5, 5)}, trained=(1, 0)))
    assert found is not None
    assert (found.drawn, found.trained, found.drawn_mean, found.trained_mean) == (4, 4, 25.0, 25.0)
    assert (found.distance, found.p, found.unknown, found.ratio) == (0.0, 1.0, 0, 1.0)


def test_a_short_prompt_in_the_place_of_a_long_one_is_seen() -> None:
    """Drawn: 10, 20, 30, 90. Trained: 10, 20, 5, 5. Up to 20, half of one and all of the other are below."""
    record = RecordedLengths(3, {0: (10, 20), 1: (30, 90), 2: (5, 5)}, trained=(0, 2))
    found = length_bias(record)
    assert found is not None
    assert (found.drawn_mean, found.trained_mean, found.distance) == (37.5, 10.0, 0.5)
    assert found.p == 1.0, "two prompts can be exchanged in two ways, which are alike"


def test_a_prompt_without_a_length_is_longer_than_all_others_and_counted() -> None:
    """Left out, it would be no difference that its place was taken. Up to 20 are half of one and all of the other."""
    found = length_bias(RecordedLengths(3, {0: (10, 20), 2: (5, 5)}, trained=(0, 2)))
    assert found is not None and (found.unknown, found.drawn, found.trained, found.p) == (1, 2, 4, 1.0)
    assert (found.distance, found.drawn_mean, found.trained_mean) == (0.5, 15.0, 10.0)
    assert length_bias(RecordedLengths(3, {}, trained=())) is None
    assert length_bias(RecordedLengths(3, {2: (5, 5)}, trained=(2,))) is None, "of what was drawn nothing is known"


def test_long_prompts_that_never_end_are_a_bias() -> None:
    """Of forty prompts every second one is in flight to the end, and a short one is trained in its place."""
    lengths = {place: (10 + place % 7, 12) for place in range(60) if place >= 40 or place % 2}
    found = length_bias(RecordedLengths(60, lengths, trained=tuple(lengths)))
    assert found is not None and (found.unknown, found.distance) == (20, 0.5)
    assert found.p is not None and found.p < 0.01


def test_p_is_the_share_of_exchanges_with_as_large_a_distance() -> None:
    """Of the 20 ways to choose 3 of 6 prompts, 2 part short from long: one in ten."""
    p = permutation_p([(1,), (2,), (3,)], [(7,), (8,), (9,)])
    assert p == pytest.approx(0.1, abs=0.03)
    assert permutation_p([(1,), (9,)], [(2,), (8,)]) > 0.5
    assert permutation_p([], [(1,)]) is None


def test_samples_of_a_prompt_count_as_one_draw() -> None:
    """A hundred like samples of a prompt prove no more than one."""
    few, many = (permutation_p([(1,) * n, (2,) * n], [(8,) * n, (9,) * n]) for n in (1, 100))
    assert few == many and few > 0.2  # 2 of 6 ways


def test_more_lengths_than_points_are_compared_at_some_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "POINTS", 4)
    short, long = [(n, n + 1) for n in range(0, 40, 2)], [(n, n + 1) for n in range(100, 140, 2)]
    assert permutation_p(short, long) == pytest.approx(1 / 1000)


def test_a_sample_is_a_row() -> None:
    rows = list(sample_rows(RecordedLengths(3, {0: (10,), 2: (5, 6)}, trained=(2,))))
    assert rows[0] == {"prompt": 0, "sample": 0, "tokens": 10, "drawn": True, "trained": False}
    assert rows[2] == {"prompt": 2, "sample": 1, "tokens": 6, "drawn": False, "trained": True}
