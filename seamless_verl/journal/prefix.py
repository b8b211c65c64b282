"""Which earlier call of the same session began with the same bytes.

An agent sends its whole conversation again with every call; writing only what is new keeps a session
linear in its tokens. Prefixes are known by a chain of digests of whole blocks, so forks and
sub-agents find their common trunk, and memory is small next to the bytes themselves.

Invariant: a digest points at a call whose sequence begins with the bytes that digest stands for. The index
only saves bytes: what it has forgotten, as after a restart, is written in full once more.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

BLOCK = 1024  # bytes: 256 tokens. Smaller repeats less of the last block, larger keeps less in memory
LIMIT = 1 << 18  # blocks remembered, near 60 MB, over all sessions; the least recently used go first


class PrefixDigests:
    """The index over all sessions of one journal; a session's `seed` keeps it to itself."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._owners: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def clear(self) -> None:
        self._owners.clear()

    def owner(self, digest: bytes) -> int | None:
        owner = self._owners.get(digest)
        if owner is not None:
            self._owners.move_to_end(digest)
        return owner

    def add(self, digest: bytes, call: int) -> None:
        self._owners.setdefault(digest, call)
        if len(self._owners) > self._limit:
            self._owners.popitem(last=False)


class PrefixChain:
    """One call's sequence as it grows; every whole block of it becomes known to the index."""

    def __init__(self, index: PrefixDigests, call: int, seed: bytes) -> None:
        self._index, self._call, self._digest, self._tail = index, call, seed, b""

    def start(self, data: bytes) -> tuple[int | None, int]:
        """Feed the beginning; the call that has the longest known prefix of it, and that prefix's bytes."""
        base, shared = None, 0
        for end in range(BLOCK, len(data) + 1, BLOCK):
            self._digest = _next(self._digest, data[end - BLOCK : end])
            owner = self._index.owner(self._digest) if shared == end - BLOCK else None
            if owner is not None:
                base, shared = owner, end
            else:
                self._index.add(self._digest, self._call)
        self._tail = data[len(data) - len(data) % BLOCK :]
        return base, shared

    def feed(self, data: bytes) -> None:
        """Feed what follows."""
        data = self._tail + data
        for end in range(BLOCK, len(data) + 1, BLOCK):
            self._digest = _next(self._digest, data[end - BLOCK : end])
            self._index.add(self._digest, self._call)
        self._tail = data[len(data) - len(data) % BLOCK :]


def _next(digest: bytes, block: bytes) -> bytes:
    return blake2b(digest + block, digest_size=16).digest()
