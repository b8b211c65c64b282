"""Prompts that were rendered a moment ago: the sessions of one group begin with the same words.

Owned state: ids by what they were rendered from; the longest unused go first, and all within `seconds`, for a
template may say what day it is.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from time import monotonic

TOKENS = 1 << 20
SECONDS = 60.0


class PromptCache:
    """At most `tokens` of them all together."""

    def __init__(
        self, *, tokens: int = TOKENS, seconds: float = SECONDS, clock: Callable[[], float] = monotonic
    ) -> None:
        self._tokens, self._seconds, self._clock = tokens, seconds, clock
        self._kept: OrderedDict[bytes, tuple[float, array[int]]] = OrderedDict()
        self._size = 0

    def get(self, key: bytes) -> array[int] | None:
        rendered_at, ids = self._kept.get(key, (None, None))
        if rendered_at is None or self._clock() - rendered_at > self._seconds:
            return None
        self._kept.move_to_end(key)
        return ids

    def put(self, key: bytes, ids: array[int]) -> None:
        _, old = self._kept.pop(key, (0.0, ()))
        self._kept[key] = self._clock(), ids
        self._size += len(ids) - len(old)
        while self._size > self._tokens:
            _, (_, gone) = self._kept.popitem(last=False)
            self._size -= len(gone)


def key_of(*parts: object) -> bytes:
    """Equal for what a template cannot tell apart; the order of names counts, for a template may write it out."""
    return blake2b(json.dumps(parts, separators=(",", ":"), default=str).encode(), digest_size=16).digest()
