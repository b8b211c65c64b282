"""An index that finds the earlier call of the same session that begins with the same bytes.

An agent sends its whole conversation again with every call. The journal writes only what is new, so that a session's
size is linear in its tokens. Prefixes are identified by chained digests of whole blocks: forks and sub-agents find
their common prefix, and the index is small compared with the bytes.

Invariant: a digest maps to a call of its session whose sequence begins with the bytes of that digest. The index only
saves bytes: a prefix that it has lost, for example by a restart, is written in full once more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

BLOCK_BYTES = 1024  # 256 tokens. A smaller block repeats less at the end of a prefix, a larger one needs less memory
MAX_BLOCKS = 1 << 18
"""Of all open sessions. Beyond it the least recently used session has none: its next call is written in full."""


class PrefixDigests:
    """The index of one journal: for each open session, the call of each digest."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks, self._size = max_blocks, 0
        self._sessions: OrderedDict[int, dict[bytes, int]] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def clear(self) -> None:
        self._sessions.clear()
        self._size = 0

    def drop(self, session: int) -> None:
        """The session begins no further call."""
        self._size -= len(self._sessions.pop(session, ()))

    def find(self, session: int, digest: bytes) -> int | None:
        """The session's call whose sequence begins with the bytes of this digest."""
        calls = self._sessions.get(session)
        if calls is None:
            return None
        self._sessions.move_to_end(session)
        return calls.get(digest)

    def add(self, session: int, digest: bytes, call: int) -> None:
        """Maps the digest to the call, unless another call of the session has it."""
        calls = self._sessions.setdefault(session, {})
        self._sessions.move_to_end(session)
        before = len(calls)
        calls.setdefault(digest, call)
        self._size += len(calls) - before
        if self._size > self._max_blocks:
            self.drop(next(iter(self._sessions)))


class PrefixChain:
    """One call's growing sequence; each whole block of it is added to the index of its session.

    `kind` keeps sequences of different kinds separate.
    """

    def __init__(self, index: PrefixDigests, session: int, call: int, kind: bytes) -> None:
        self._index, self._session, self._call, self._digest, self._tail = index, session, call, kind, b""

    def begin(self, data: bytes) -> tuple[int | None, int]:
        """Adds the beginning; returns the call that shares its longest indexed prefix, and that prefix's bytes."""
        base, shared = None, 0
        for end in range(BLOCK_BYTES, len(data) + 1, BLOCK_BYTES):
            self._digest = _chain_digest(self._digest, data[end - BLOCK_BYTES : end])
            call = self._index.find(self._session, self._digest) if shared == end - BLOCK_BYTES else None
            if call is not None:
                base, shared = call, end
            else:
                self._index.add(self._session, self._digest, self._call)
        self._tail = data[len(data) - len(data) % BLOCK_BYTES :]
        return base, shared

    def extend(self, data: bytes) -> Callable[[], None]:
        """Adds the bytes that follow; returns what undoes that, but for the index."""
        before = self._digest, self._tail

        def undo() -> None:
            self._digest, self._tail = before

        data = self._tail + data
        for end in range(BLOCK_BYTES, len(data) + 1, BLOCK_BYTES):
            self._digest = _chain_digest(self._digest, data[end - BLOCK_BYTES : end])
            self._index.add(self._session, self._digest, self._call)
        self._tail = data[len(data) - len(data) % BLOCK_BYTES :]
        return undo


def _chain_digest(digest: bytes, block: bytes) -> bytes:
    return blake2b(digest + block, digest_size=16).digest()
