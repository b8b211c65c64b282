"""The prompt cache: the latest prompts, for a while."""

from __future__ import annotations

from seamless_verl.runtime.prompt_cache import PromptCache, prompt_key, strict_prompt_key
from seamless_verl.trajectory.records import tokens


def test_a_used_prompt_is_kept_longer() -> None:
    cache = PromptCache(tokens=4)
    cache.put(b"a", tokens([1, 2]))
    cache.put(b"b", tokens([3, 4]))
    assert cache.get(b"a") == tokens([1, 2])
    cache.put(b"c", tokens([5]))
    cache.put(b"long", tokens(range(5)))
    assert cache.get(b"a") is not None and cache.get(b"b") is None and cache.get(b"long") is None


def test_an_old_prompt_is_not_used() -> None:
    now = 0.0
    cache = PromptCache(seconds=60, clock=lambda: now)
    cache.put(b"a", tokens([1]))
    now = 59.9
    assert cache.get(b"a") == tokens([1])
    now = 60.1
    assert cache.get(b"a") is None


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
