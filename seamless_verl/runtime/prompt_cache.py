"""Caches rendered prompts: the sessions of one group begin with the same prompt.

Owned state: token ids by the key of what they were rendered from. The least recently used go first. None is used
longer than `seconds`, for a template may contain the date; those that are older are removed as others come.
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
    """Holds prompts of at most `tokens` ids in total."""

    def __init__(
        self, *, tokens: int = TOKENS, seconds: float = SECONDS, clock: Callable[[], float] = monotonic
    ) -> None:
        self._tokens, self._seconds, self._clock = tokens, seconds, clock
        self._prompts: OrderedDict[bytes, tuple[float, array[int]]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, key: bytes) -> array[int] | None:
        rendered_at, ids = self._prompts.get(key, (None, None))
        if rendered_at is None or self._clock() - rendered_at > self._seconds:
            return None
        self._prompts.move_to_end(key)
        return ids

    def put(self, key: bytes, ids: array[int]) -> None:
        _, replaced = self._prompts.pop(key, (0.0, ()))
        self._prompts[key] = self._clock(), ids
        self._size += len(ids) - len(replaced)
        while self._size > self._tokens or self._first_is_too_old():
            _, (_, dropped) = self._prompts.popitem(last=False)
            self._size -= len(dropped)

    def _first_is_too_old(self) -> bool:
        first = next(iter(self._prompts.values()), None)
        return first is not None and self._clock() - first[0] > self._seconds


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
