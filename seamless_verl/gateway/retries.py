"""Retried requests: an SDK repeats a request when it did not get the reply.

A retry joins the calls that still run, or reads again what they produced, instead of sampling anew. It is known by its
mark (a retry count or an idempotency key), never by its content: the same prompt sent twice is two samples.

Invariants:
- The output of a call that was cancelled or failed is not given to a retry: its retry is a new request.
- An attempt without an idempotency key is forgotten when its reply was sent in full, and it is retried once.
- An attempt whose request is served, that runs, or that a restart interrupted, is never forgotten.
- A request that was refused or failed left no output. Of as many requests as failed, the next marked retries match
  nothing, lest they get the output of another request of the same content.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.journal import StoredCall
from seamless_verl.rollout.call import Call
from seamless_verl.trajectory.records import Finish, Segment, TokenChunk, TopLogprobs, append_chunk, empty_chunk

MAX_FAILED = 64  # contents of requests of a session of which it is kept how many failed
RETRIED = frozenset({408, 409, 429})
"""Statuses below 500 after which the SDKs repeat a request, as they do after all from 500 on."""
MAX_ATTEMPTS = 8  # attempts of a session that can be retried; the oldest that has ended is dropped first


def is_retried(status: int | None) -> bool:
    """Whether SDKs repeat a request that got an error of this status; None: it got no response."""
    return status is None or status >= 500 or status in RETRIED


def do_nothing() -> None: ...


class CallOutput:
    """One call's tokens; every reader gets them from the start, and then as they arrive."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._top: list[TopLogprobs | None] = []  # of each token, where known; may be shorter than the tokens
        self._length = 0
        self._last: TokenChunk | None = None
        self._changed = asyncio.Event()
        self.failed = False
        self.readers = 0
        self.on_last_reader_left: Callable[[], None] = do_nothing

    @classmethod
    def from_record(cls, segments: Iterable[Segment], finish: Finish, stop_reason: int | str | None) -> CallOutput:
        output = cls()
        for segment in segments:
            output.add(segment.chunk())
        output.add(empty_chunk(finish, stop_reason=stop_reason))
        return output

    @property
    def running(self) -> bool:
        return self._last is None and not self.failed

    def add(self, chunk: TokenChunk) -> None:
        chunk = chunk.without_routes()  # for training alone
        if chunk.top:
            self._top.extend([None] * (self._length - len(self._top)))
            self._top.extend(chunk.top)
        append_chunk(self._segments, chunk)
        self._length += len(chunk.ids)
        if chunk.finish_reason is not None:
            self._last = chunk
        self._notify_readers()

    def fail(self) -> None:
        """Marks the call as cancelled or failed; its readers get FAILED."""
        self.failed = True
        self._notify_readers()

    async def stream(self, call: Call) -> AsyncGenerator[TokenChunk, None]:
        """This output as a CallSource, whatever the call."""
        self.readers += 1
        try:
            position = 0
            while True:
                changed, ended = self._changed, not self.running
                chunks = list(self._chunks_from(position))
                for chunk in _with_end(chunks, self._last_chunk()) if ended else chunks:
                    position += len(chunk.ids)
                    yield chunk
                if ended:
                    return
                await changed.wait()
        finally:
            self.readers -= 1
            if not self.readers:
                self.on_last_reader_left()

    def _chunks_from(self, position: int) -> Iterator[TokenChunk]:
        """The tokens from that position on, one chunk a segment."""
        start = 0
        for segment in self._segments:
            end, skipped = start + len(segment), max(position - start, 0)
            if skipped < len(segment):
                top = self._top_between(start + skipped, end)
                yield replace(segment.part(skipped, len(segment)).chunk(), top=top)
            start = end

    def _top_between(self, start: int, end: int) -> tuple[TopLogprobs, ...] | None:
        """None unless every one of these tokens has them."""
        known = tuple(entry for entry in self._top[start:end] if entry is not None)
        return known if len(known) == end - start else None

    def _last_chunk(self) -> TokenChunk:
        last = self._last
        if last is None:
            return empty_chunk(Finish.FAILED)
        return empty_chunk(last.finish_reason, version=last.version, replica=last.replica, stop_reason=last.stop_reason)

    def _notify_readers(self) -> None:
        if self.readers:
            self._changed.set()
            self._changed = asyncio.Event()


def _with_end(chunks: list[TokenChunk], end: TokenChunk) -> list[TokenChunk]:
    """The chunks with the end on the last tokens, as an engine gives it: a token that ended the call is no text.

    Not so that of a stop string, which a reader finds in the text of these tokens, nor a failure.
    """
    if not chunks or end.finish_reason is Finish.FAILED or isinstance(end.stop_reason, str):
        return [*chunks, end]
    return [*chunks[:-1], replace(chunks[-1], finish_reason=end.finish_reason, stop_reason=end.stop_reason)]


@dataclass(eq=False)
class Attempt:
    """One request that can be retried; its calls are under their indices in the request."""

    digest: str
    key: str | None
    number: int = 0  # of the request in its session
    reply_name: str = ""  # which the ids of its replies end with, also those to retries
    outputs: dict[int, CallOutput] = field(default_factory=dict)
    interrupted_calls: dict[int, StoredCall] = field(default_factory=dict)  # by a restart, until a retry continues them
    sent: bool = False  # its reply was sent in full
    claimed: bool = False  # a retry uses it now
    requests: int = 0  # that are served now, such as one that is still rendered

    @property
    def failed(self) -> bool:
        return any(output.failed for output in self.outputs.values())

    @property
    def repeatable(self) -> bool:
        return bool(self.outputs or self.interrupted_calls) and not self.failed

    @property
    def running(self) -> bool:
        return bool(self.interrupted_calls) or any(output.running for output in self.outputs.values())


class Attempts:
    """The requests of one session that a retry may refer to, oldest first."""

    def __init__(self) -> None:
        self._attempts: list[Attempt] = []
        self._failed: dict[str, int] = {}  # requests that failed whose retries have not come, by their digests

    def __len__(self) -> int:
        return len(self._attempts)

    def find(self, digest: str, *, key: str | None, retry: bool) -> Attempt | None:
        """The attempt that this request repeats; None for a new request. Without a key it is claimed.

        Raises ApiError when the idempotency key was sent before with another request.
        """
        if key is not None:
            return self._find_by_key(digest, key)
        if not retry or self._take_failed(digest):
            return None
        same = [attempt for attempt in self._attempts if attempt.digest == digest and attempt.repeatable]
        free = [attempt for attempt in same if not attempt.sent and not attempt.claimed]
        # An agent may have read what ended before a restart; it cannot have read what the restart interrupted.
        found = next((attempt for attempt in free if attempt.interrupted_calls), None) or next(iter(free), None)
        if found is not None:
            found.claimed = True
        return found

    def _find_by_key(self, digest: str, key: str) -> Attempt | None:
        found = next((attempt for attempt in self._attempts if attempt.key == key and attempt.repeatable), None)
        if found is not None and found.digest != digest:
            raise ApiError(ErrorCode.REUSED_KEY, f"Idempotency-Key {key!r} came with another request. Use a new one")
        return found

    def add(self, attempt: Attempt) -> None:
        """Appends an attempt; after a restart they are added in the order in which they began."""
        ended = (other for other in self._attempts if not other.running and not other.requests)
        if len(self._attempts) >= MAX_ATTEMPTS and (oldest := next(ended, None)) is not None:
            self._attempts.remove(oldest)
        self._attempts.append(attempt)

    def mark_sent(self, attempt: Attempt) -> None:
        """The reply was sent in full; without an idempotency key the attempt is forgotten."""
        attempt.sent = True
        if attempt.key is None:
            self.remove(attempt)

    def remove(self, attempt: Attempt) -> bool:
        """Forgets an attempt; False if it was not listed, which is no error."""
        listed = attempt in self._attempts
        if listed:
            self._attempts.remove(attempt)
        return listed

    def note_failed(self, digest: str) -> None:
        """A request of this content was refused, or failed, and is not listed: its retry will be a new request."""
        self._failed[digest] = self._failed.pop(digest, 0) + 1
        if len(self._failed) > MAX_FAILED:
            del self._failed[next(iter(self._failed))]

    def _take_failed(self, digest: str) -> bool:
        """Whether a marked retry is that of a request that failed; each is retried once."""
        listed = (one for one in self._attempts if one.digest == digest and one.key is None and one.failed)
        if (attempt := next(listed, None)) is not None:  # its request is about to end
            return self.remove(attempt)
        if not (count := self._failed.pop(digest, 0)):
            return False
        if count > 1:
            self._failed[digest] = count - 1
        return True
