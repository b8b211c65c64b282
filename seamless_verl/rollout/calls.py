"""Calls: each runs to its end, over however many replicas and pauses that takes.

Invariants:
- Every call that began has exactly one outcome, or is running; one whose client went away is CANCELLED.
- A call holds a slot from before its request is sent until the engine has ended it or it was aborted.
- A call stands in line where its age puts it, also after a cut: that of its conversation, so that what has begun ends
  before more begins.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import lru_cache
from itertools import count

from seamless_verl.errors import IntegrityError, ReplicaLostError
from seamless_verl.rollout.continuation import Call, Piece, Progress
from seamless_verl.rollout.engine import Delta, EngineFinish
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.replica import Lease
from seamless_verl.trajectory.records import Finish, logprobs, tokens

__all__ = ["Call", "Calls", "Piece"]

REMEMBERED = 16_384  # conversations whose age is known; one that was silent while so many others called is as a new one
NOT_ENDED = Delta(tokens(()), logprobs(()), 0, EngineFinish.CUT)  # an engine that stops without a word has cut


class Calls:
    """Runs calls over a fleet.

    A call fails when `max_losses` + 1 replicas in a row are lost under it, or cut it on their own account,
    without one token. `grammars_resume`: the engines advance a grammar over the `carried` ids of a request.
    """

    def __init__(self, fleet: Fleet, *, max_losses: int = 8, grammars_resume: bool = False) -> None:
        self._fleet, self._max_losses, self._grammars_resume = fleet, max_losses, grammars_resume
        self._tickets = count()
        self._ticket = lru_cache(maxsize=REMEMBERED)(lambda key: next(self._tickets))
        self._begun = self._running = self._tokens = 0
        self._ended: Counter[Finish] = Counter()

    async def stream(self, call: Call) -> AsyncGenerator[Piece, None]:
        """The call's tokens as they come; the last piece says how it ended, FAILED with its `error`.

        Closing the generator ends the call as CANCELLED. Errors that are nobody's failure to serve, such as a
        defect of an engine, are raised, and the call counts as FAILED.
        """
        progress = Progress(call, max_losses=self._max_losses, grammars_resume=self._grammars_resume)
        ticket = self._ticket(call.key) if call.key else next(self._tickets)
        self._begun, self._running = self._begun + 1, self._running + 1
        try:
            if (last := progress.resumed()) is not None:
                yield last
            while progress.finish is None:
                async with aclosing(self._attempt(progress, ticket)) as pieces:
                    async for piece in pieces:
                        self._tokens += len(piece.ids)
                        yield piece
        except (GeneratorExit, asyncio.CancelledError):
            progress.finish = progress.finish or Finish.CANCELLED
            raise
        finally:
            self._running -= 1
            self._ended[progress.finish or Finish.FAILED] += 1

    def metrics(self) -> dict[str, float]:
        ended = {f"calls/{finish}": float(self._ended[finish]) for finish in Finish}
        return ended | {
            "calls/begun": float(self._begun),
            "calls/running": float(self._running),
            "calls/tokens": float(self._tokens),
        }

    def check_integrity(self) -> None:
        """Raises IntegrityError unless calls begun = running + ended."""
        if self._begun != (known := self._running + self._ended.total()):
            raise IntegrityError("calls running + ended", self._begun, known)

    async def _attempt(self, progress: Progress, ticket: int) -> AsyncGenerator[Piece, None]:
        """What one replica gives, until the call's end or a cut."""
        lease: Lease | None = None
        try:
            lease = await self._fleet.acquire(progress.call.affinity, ticket)
            async with aclosing(self._pieces(progress, lease)) as pieces:
                async for piece in pieces:
                    yield piece
        except ReplicaLostError as loss:
            assert lease is not None
            self._fleet.lost(lease.replica.replica_id, loss.reason, engine=lease.engine)
            if (last := progress.cut(str(loss))) is not None:
                yield last
        finally:
            if lease is not None:
                lease.release()

    async def _pieces(self, progress: Progress, lease: Lease) -> AsyncGenerator[Piece, None]:
        if not lease.attached:  # dropped between its grant and this task's turn
            return
        replica, ended = lease.replica.replica_id, None
        async with aclosing(lease.engine.generate(progress.request())) as deltas:
            while ended is None:
                delta = await anext(deltas, NOT_ENDED)
                if (ended := delta.finish) is not None:
                    unexplained = f"cut by replica {replica}, which was not paused" if lease.unexplained else None
                    lease.release()  # a client that is slow to take the rest holds no slot
                if (piece := progress.take(delta, replica)) is not None:
                    yield piece
        if (last := progress.cut(unexplained)) is not None:
            yield last
