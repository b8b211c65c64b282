"""What a call still has to generate, foreseen from calls that have ended; and what caches spare."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.rollout.observation import CACHE_METRICS, REMEMBERED, CacheUse, CacheUseOfAll, LengthForecast


def forecast(*lengths: int) -> LengthForecast:
    found = LengthForecast()
    for length in lengths:
        found.add(length)
    return found


def test_it_is_the_mean_of_what_longer_calls_had_still_to_go() -> None:
    lengths = forecast(10, 20, 60)
    assert lengths.remaining(0) == 30.0
    assert lengths.remaining(10) == 30.0, "of 20 and 60"
    assert lengths.remaining(59) == 1.0
    assert lengths.remaining(60) == 60.0, "longer than all: half done"
    assert lengths.remaining(10, limit=12) == 12
    assert forecast().remaining(7) == 7.0


def test_old_lengths_are_forgotten() -> None:
    lengths = forecast(1_000_000, *[5] * REMEMBERED)
    assert lengths.remaining(0) == 5.0


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(0, 60))
def test_it_is_that_mean_for_any_lengths(lengths: list[int], produced: int) -> None:
    longer = [length - produced for length in lengths if length > produced]
    assert forecast(*lengths).remaining(produced) == pytest.approx(mean(longer) if longer else produced)


def test_looks_add_up_over_engines_and_over_one_that_was_started_again() -> None:
    use = CacheUseOfAll()
    assert use.metrics() == dict.fromkeys(CACHE_METRICS, 0.0)
    use.look("a", CacheUse(100, 60, 1))
    use.look("b", CacheUse(10, 0, 0))
    use.look("a", CacheUse(150, 90, 4, 8, 3, 2, 0.5))
    use.begins_again("a")
    use.look("a", CacheUse(170, 5, 2, 1, 1, 1, 0.25))
    assert use.metrics() == {
        **{"cache/prompt_tokens": 330.0, "cache/cached_tokens": 95.0, "cache/preempted": 6.0},
        **{"drafts/drafted": 9.0, "drafts/accepted": 4.0},
        **{"drafts/accepted_of_prompt": 3.0, "drafts/saved_s": 0.75},
    }
