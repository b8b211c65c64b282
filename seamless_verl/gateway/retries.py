"""A call's tokens while a retry of its request may still ask for them.

Invariants:
- A tape's runs spell the call's tokens in order; neighbours differ in weight version or replica.
- A tape that broke off (its call was cancelled or failed) is not read again.

Requests that come again: an SDK repeats one whose reply it did not get.

The repetition joins the calls while they run, or reads again what they gave, instead of sampling anew. It is
known by its mark (a retry count, an idempotency key), never by its content alone: the same prompt sampled twice
is two samples.

Invariants:
- An attempt that broke off is not repeated: its retry is a new request.
- One without an idempotency key is forgotten when its reply has been sent in full, and repeated once.
- One that runs, or would go on if it were asked for again, is never forgotten.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field

from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.journal import StoredCall
from seamless_verl.rollout.call import Call, Piece
from seamless_verl.rollout.engine import TopLogprobs
from seamless_verl.trajectory.records import LOGPROB, TOKEN, Finish, Segment


@dataclass(eq=False, slots=True)
class _Run:
    version: int
    replica: str
    ids: array[int] = field(default_factory=lambda: array(TOKEN))
    logprobs: array[float] = field(default_factory=lambda: array(LOGPROB))
    top: list[TopLogprobs] = field(default_factory=list)

    def since(self, start: int) -> Piece:
        top = tuple(self.top[start:]) if self.top else None
        return Piece(self.ids[start:], self.logprobs[start:], self.version, self.replica, top=top)


class CallOutput:
    """One call's pieces, merged; followers read them from the start, and then as they come."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []
        self._end: Piece | None = None
        self._changed = asyncio.Event()
        self.broken = False
        self.followers = 0
        self.abandoned: Callable[[], None] = lambda: None
        """Called when the last follower leaves."""

    @property
    def running(self) -> bool:
        return self._end is None and not self.broken

    def add(self, piece: Piece) -> None:
        if not self._runs or (self._runs[-1].version, self._runs[-1].replica) != (piece.version, piece.replica):
            self._runs.append(_Run(piece.version, piece.replica))
        run = self._runs[-1]
        run.ids.extend(piece.ids)
        run.logprobs.extend(piece.logprobs)
        run.top.extend(piece.top or ())
        if piece.finish is not None:
            self._end = piece
        self._wake()

    @classmethod
    def recorded(cls, segments: Iterable[Segment], finish: Finish, stop_reason: int | str | None) -> CallOutput:
        """The tape of a call that ended, from its record."""
        tape = cls()
        for one in segments:
            tape.add(Piece(one.ids, one.logprobs, one.version, one.replica))
        tape.add(Piece(array(TOKEN), array(LOGPROB), 0, "", finish, stop_reason))
        return tape

    def break_off(self) -> None:
        self.broken = True
        self._wake()

    def _wake(self) -> None:
        if self.followers:
            self._changed.set()
            self._changed = asyncio.Event()

    async def stream(self, call: Call) -> AsyncGenerator[Piece, None]:
        """A CallSource: what is on the tape, whatever the call. A tape that breaks off ends with FAILED."""
        self.followers += 1
        try:
            run, start = 0, 0
            while True:
                changed = self._changed
                while run < len(self._runs):
                    if start < len(self._runs[run].ids):
                        piece = self._runs[run].since(start)
                        start += len(piece.ids)
                        yield piece
                    elif run + 1 < len(self._runs):
                        run, start = run + 1, 0
                    else:
                        break
                if not self.running:
                    yield self._last()
                    return
                await changed.wait()
        finally:
            self.followers -= 1
            if not self.followers:
                self.abandoned()

    def _last(self) -> Piece:
        nothing: tuple[array[int], array[float]] = array(TOKEN), array(LOGPROB)
        if self._end is None:
            return Piece(*nothing, 0, "", Finish.FAILED)
        return Piece(*nothing, self._end.version, self._end.replica, self._end.finish, self._end.stop_reason)


KEPT = 8  # attempts of a session that can be repeated; the oldest that has ended goes first


@dataclass(eq=False)
class Attempt:
    """One request that can be repeated, with a tape for each of its calls by their order in it.

    `cuts` are the calls that a restart cut, until a repetition goes on with them; `number` is the request's in its
    session.
    """

    digest: str
    key: str | None
    number: int = 0
    tapes: dict[int, CallOutput] = field(default_factory=dict)
    cuts: dict[int, StoredCall] = field(default_factory=dict)
    sent: bool = False
    joined: bool = False

    @property
    def repeatable(self) -> bool:
        return bool(self.tapes or self.cuts) and not any(tape.broken for tape in self.tapes.values())

    @property
    def running(self) -> bool:
        return bool(self.cuts) or any(tape.running for tape in self.tapes.values())


class Attempts:
    """The requests of one session that a retry may refer to."""

    def __init__(self) -> None:
        self._known: list[Attempt] = []

    def __len__(self) -> int:
        return len(self._known)

    def repeated(self, digest: str, *, key: str | None, retry: bool) -> Attempt | None:
        """The earlier attempt this request repeats; None for a new one.

        Raises:
            Refusal: the idempotency key came with another request.
        """
        if key is not None:
            found = next((one for one in self._known if one.key == key and one.repeatable), None)
            if found is not None and found.digest != digest:
                raise ApiError(
                    ErrorCode.REUSED_KEY, f"Idempotency-Key {key!r} came with another request. Use a new one"
                )
            return found
        if not retry:
            return None
        same = [one for one in self._known if one.digest == digest and one.repeatable]
        open_ones = [one for one in same if not one.sent and not one.joined]
        # What ended before a restart may have been read in full, what the restart cut was not.
        found = next((one for one in open_ones if one.cuts), None) or next(iter(open_ones), None)
        if found is not None:
            found.joined = True
        return found

    def begin(self, digest: str, key: str | None, number: int = 0) -> Attempt:
        attempt = Attempt(digest, key, number)
        self.restore(attempt)
        return attempt

    def restore(self, attempt: Attempt) -> None:
        """Takes in an attempt as it was, in the order of their beginnings."""
        self._known.append(attempt)
        if len(self._known) > KEPT:
            ended = next((one for one in self._known if not one.running and one is not attempt), None)
            if ended is not None:
                self._known.remove(ended)

    def sent(self, attempt: Attempt) -> None:
        """Its reply has gone out in full."""
        attempt.sent = True
        if attempt.key is None and attempt in self._known:
            self._known.remove(attempt)

    def forget(self, attempt: Attempt) -> None:
        """It came to nothing."""
        if attempt in self._known:
            self._known.remove(attempt)
