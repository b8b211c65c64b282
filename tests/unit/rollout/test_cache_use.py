"""What all engines' caches spare and cost, from looks at each."""

from __future__ import annotations

from seamless_verl.rollout.cache_use import CACHE_METRICS, CacheUse, CacheUseOfAll


def test_looks_add_up_over_engines_and_over_one_that_was_started_again() -> None:
    use = CacheUseOfAll()
    assert use.metrics() == dict.fromkeys(CACHE_METRICS, 0.0)
    use.look("a", CacheUse(100, 60, 1))
    use.look("b", CacheUse(10, 0, 0))
    use.look("a", CacheUse(150, 90, 4))
    use.begins_again("a")
    use.look("a", CacheUse(170, 5, 2))
    assert use.metrics() == {"cache/prompt_tokens": 330.0, "cache/cached_tokens": 95.0, "cache/preempted": 6.0}
