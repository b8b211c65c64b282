"""A call that a restart cut, going on: what is on record first, then what comes after it.

The continuation begins when the retry asks for it, not at the restart. Stop strings, the parsers of replies and
the shape of the answer are the request's, and only the retry brings the request; and an agent that died along
with the gateway never asks, so that nothing is generated for nobody. The retry waits for the tokens that are
missing, which is what it would have waited for in any case.

Invariant: what is on record is shown again, but neither recorded nor counted again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from seamless_verl.gateway.protocols import CallSource, NullRecorder, Recorder, SessionCall
from seamless_verl.gateway.session import Session
from seamless_verl.journal import StoredCall
from seamless_verl.rollout.call import Piece
from seamless_verl.trajectory.records import Finish, logprobs, tokens

OWN = "gateway"
"""Under this key of a recorded request stands what the gateway needs to know its call again."""


def produced(record: StoredCall) -> int:
    """Tokens on record."""
    return sum(len(segment) for segment in record.segments)


@dataclass(frozen=True)
class ResumedSource:
    """A CallSource for one call."""

    record: StoredCall
    source: CallSource

    async def stream(self, call: SessionCall) -> AsyncGenerator[Piece, None]:
        ids = tokens(())
        for one in self.record.segments:
            ids.extend(one.ids)
            yield Piece(one.ids, one.logprobs, one.version, one.replica)
        async with aclosing(self.source.stream(replace(call, produced=ids))) as pieces:
            async for piece in pieces:
                yield piece


class RecordedOffset:
    """The last of a number of tokens that were dealt with before a restart."""

    def __init__(self, known: int) -> None:
        self._left = known

    def new(self, number: int) -> int:
        """How many of the next tokens are new; pieces hold either old ones or new ones."""
        old = min(self._left, number)
        self._left -= old
        assert old in (0, number), "a piece is partly on record"
        return number - old


class ResumedRecorder(NullRecorder):
    """A recorder for one call, which is on record as started, with tokens."""

    def __init__(self, recorder: Recorder, known: int) -> None:
        self._recorder, self._beyond = recorder, RecordedOffset(known)

    def noted(self, call: SessionCall, piece: Piece) -> None:
        self._recorder.noted(call, self._new(piece))

    async def piece(self, call: SessionCall, piece: Piece) -> None:
        await self._recorder.piece(call, self._new(piece))

    def _new(self, piece: Piece) -> Piece:
        if piece.ids and not self._beyond.new(len(piece.ids)):
            return replace(piece, ids=tokens(()), logprobs=logprobs(()), top=None)
        return piece

    async def ended(self, call: SessionCall, finish: Finish, reply: dict[str, Any]) -> None:
        await self._recorder.ended(call, finish, reply)


def counting(session: Session, known: int) -> Callable[[int], None]:
    """Counts a call's tokens in its session, less those that were counted already."""
    beyond = RecordedOffset(known)
    return lambda number: session.count(beyond.new(number))


def resumed(call: SessionCall, record: StoredCall) -> SessionCall:
    """The call a retry makes, as the one on record: its id, its prompt, and the budget it was given."""
    budget = record.request.get(OWN, {}).get("max_tokens", call.sampling["max_tokens"])
    return replace(
        call,
        call_id=record.call_id,
        prompt_ids=record.prompt_ids,
        sampling={**call.sampling, "max_tokens": budget},
        request=record.request,
    )
