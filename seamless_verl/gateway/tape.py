"""A call's tokens while a retry of its request may still ask for them.

Invariants:
- A tape's runs spell the call's tokens in order; neighbours differ in weight version or replica.
- A tape that broke off (its call was cancelled or failed) is not read again.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field

from seamless_verl.rollout.calls import Call, Piece
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


class Tape:
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
    def recorded(cls, segments: Iterable[Segment], finish: Finish, stop_reason: int | str | None) -> Tape:
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
