"""A prompt that was rendered a moment ago is not rendered again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.gateway.prompt_cache import PromptCache, key_of
from seamless_verl.trajectory.records import tokens

PUTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=30)


@given(PUTS)
def test_the_latest_are_kept_as_far_as_there_is_room(puts: list[tuple[int, int]]) -> None:
    prompts, latest = PromptCache(tokens=10), dict[int, int]()
    for name, length in puts:
        prompts.put(bytes([name]), tokens(range(length)))
        latest.pop(name, None)
        latest[name] = length
        while sum(latest.values()) > 10:
            del latest[next(iter(latest))]
    kept = {name: prompts.get(bytes([name])) for name in range(5)}
    assert {name: len(ids) for name, ids in kept.items() if ids is not None} == latest


def test_what_was_asked_for_stays_longer() -> None:
    prompts = PromptCache(tokens=4)
    prompts.put(b"a", tokens([1, 2]))
    prompts.put(b"b", tokens([3, 4]))
    assert prompts.get(b"a") == tokens([1, 2])
    prompts.put(b"c", tokens([5]))
    assert prompts.get(b"a") is not None and prompts.get(b"b") is None


def test_none_is_given_when_the_day_may_be_another() -> None:
    now = 0.0
    prompts = PromptCache(seconds=60, clock=lambda: now)
    prompts.put(b"a", tokens([1]))
    now = 60.0
    assert prompts.get(b"a") == tokens([1])
    now = 60.1
    assert prompts.get(b"a") is None


def test_the_order_of_names_counts() -> None:
    assert key_of({"a": 1, "b": 2}) != key_of({"b": 2, "a": 1})
    assert key_of([1], [2]) != key_of([1, 2]) and key_of("a") == key_of("a")
