"""What the KV caches of the engines spare, and what they cost where they are short."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Counts of one engine since it listens.

    `prompt_tokens` of its requests, of which `cached_tokens` were in the cache; the others were computed. `preempted`
    requests lost their blocks because the cache was full, and are computed again.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    preempted: int = 0


class CacheUseOfAll:
    """The sum over all engines that were looked at. Owned state: it, and the last counts of each engine."""

    def __init__(self) -> None:
        self._last: dict[str, CacheUse] = {}
        self._prompt_tokens = self._cached_tokens = self._preempted = 0

    def look(self, replica_id: str, now: CacheUse) -> None:
        """Adds what an engine has counted since the last look."""
        last = self._last.get(replica_id, CacheUse())
        self._prompt_tokens += now.prompt_tokens - last.prompt_tokens
        self._cached_tokens += now.cached_tokens - last.cached_tokens
        self._preempted += now.preempted - last.preempted
        self._last[replica_id] = now

    def begins_again(self, replica_id: str) -> None:
        """Another engine takes the place of the one that was looked at, and has counted nothing."""
        self._last.pop(replica_id, None)

    def metrics(self) -> dict[str, float]:
        return {
            "cache/prompt_tokens": float(self._prompt_tokens),
            "cache/cached_tokens": float(self._cached_tokens),
            "cache/preempted": float(self._preempted),
        }


CACHE_METRICS = frozenset(CacheUseOfAll().metrics())
