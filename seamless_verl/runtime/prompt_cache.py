"""Caches rendered prompts: the sessions of one group begin with the same prompt."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from time import monotonic

from cachetools import TTLCache

TOKENS = 1 << 20
SECONDS = 60.0


class PromptCache:
    """Token ids by the key of what they were rendered from: at most `tokens` in total, the latest used ones.

    None is used for `seconds` or longer, for a template may contain the date.
    """

    def __init__(
        self, *, tokens: int = TOKENS, seconds: float = SECONDS, clock: Callable[[], float] = monotonic
    ) -> None:
        self._prompts: TTLCache[bytes, array[int]] = TTLCache(tokens, seconds, clock, len)

    def get(self, key: bytes) -> array[int] | None:
        return self._prompts.get(key)

    def put(self, key: bytes, ids: array[int]) -> None:
        with suppress(ValueError):  # it is longer than all that the cache may hold
            self._prompts[key] = ids


def prompt_key(*parts: object) -> bytes:
    """Equal for parts that render to the same prompt. The order of names counts, for a template may write it out."""
    return _digest(json.dumps(parts, separators=(",", ":"), default=str))


def strict_prompt_key(*parts: object) -> bytes | None:
    """The same; None where a part is no JSON: its text may be that of another one."""
    try:
        return _digest(json.dumps(parts, separators=(",", ":")))
    except (TypeError, ValueError):
        return None


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
