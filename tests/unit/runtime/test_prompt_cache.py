"""The prompt cache: the latest prompts, for a while."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.runtime.prompt_cache import PromptCache, prompt_key, strict_prompt_key
from seamless_verl.trajectory.records import tokens

PUTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=30)


@given(PUTS)
def test_the_latest_prompts_are_kept_within_the_size(puts: list[tuple[int, int]]) -> None:
    cache, latest = PromptCache(tokens=10), dict[int, int]()
    for name, length in puts:
        cache.put(bytes([name]), tokens(range(length)))
        latest.pop(name, None)
        latest[name] = length
        while sum(latest.values()) > 10:
            del latest[next(iter(latest))]
    kept = {name: cache.get(bytes([name])) for name in range(5)}
    assert {name: len(ids) for name, ids in kept.items() if ids is not None} == latest


def test_a_used_prompt_is_kept_longer() -> None:
    cache = PromptCache(tokens=4)
    cache.put(b"a", tokens([1, 2]))
    cache.put(b"b", tokens([3, 4]))
    assert cache.get(b"a") == tokens([1, 2])
    cache.put(b"c", tokens([5]))
    assert cache.get(b"a") is not None and cache.get(b"b") is None


def test_an_old_prompt_is_not_used() -> None:
    now = 0.0
    cache = PromptCache(seconds=60, clock=lambda: now)
    cache.put(b"a", tokens([1]))
    now = 60.0
    assert cache.get(b"a") == tokens([1])
    now = 60.1
    assert cache.get(b"a") is None
    cache.put(b"b", tokens([2]))
    assert len(cache) == 1, "the old one goes"


def test_the_order_of_names_counts() -> None:
    assert prompt_key({"a": 1, "b": 2}) != prompt_key({"b": 2, "a": 1})
    assert prompt_key([1], [2]) != prompt_key([1, 2]) and prompt_key("a") == prompt_key("a")


def test_what_is_no_json_has_no_strict_key() -> None:
    """The text of two objects may be the same."""
    assert (
        strict_prompt_key(["a"], {"b": 1}) == strict_prompt_key(["a"], {"b": 1}) != strict_prompt_key(["a"], {"b": 2})
    )
    loop: list[object] = []
    loop.append(loop)
    assert [strict_prompt_key(part) for part in (object(), {(1, 2): "a"}, loop, b"a")] == [None] * 4
