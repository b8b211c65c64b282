"""One call on its way over however many replicas and pauses it takes.

Invariants:
- `produced` is the ids of all pieces in order, after those the call came with; each request's prompt is the call's
  prompt and all of that.
- The budgets of a request are the call's less what is produced, so that the whole call keeps to them.
- `finish` is set once.

What a continuation cannot carry: the engine sees the produced tokens as prompt, so presence and frequency
penalties (which count generated tokens only) begin anew unless the engine reads `carried`. Neither can it carry the
state of a grammar: an engine advances a new one over the `carried` ids, which `grammars_resume` says ours do. Where
they do not, a call that was cut after its first token fails with its reason, rather than be completed into text
that breaks the grammar.

Calls: each runs to its end, over however many replicas and pauses that takes.

Invariants:
- Every call that began has exactly one outcome, or is running; one whose client went away is CANCELLED.
- A call holds a slot from before its request is sent until the engine has ended it or it was aborted.
- A call stands in line where its age puts it, also after a cut: that of its conversation, so that what has begun ends
  before more begins.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import count
from typing import Any

from seamless_verl.errors import (
    CallError,
    CallGrammarError,
    CallLossesError,
    CallRefusedError,
    IntegrityError,
    ReplicaLostError,
)
from seamless_verl.rollout.engine import Delta, EngineFinish, EngineRequest, TopLogprobs
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.replica import Lease
from seamless_verl.trajectory.records import Finish, logprobs, tokens

PREFIX = 256  # tokens of the prompt that stand for it: the system prompt and tools tell agents apart

# a CUT is no end
FINISHES = {EngineFinish.STOP: Finish.STOP, EngineFinish.LENGTH: Finish.LENGTH, EngineFinish.ERROR: Finish.FAILED}


@dataclass(frozen=True, slots=True)
class Call:
    """What an agent asked for: prompt_ids int32 [P], vLLM's sampling fields.

    `key` is what its kin share, a session's name; without one it is the beginning of the prompt. `produced` int32
    is what it generated in an earlier life, before whoever ran it died: it goes on after that, within its budget.
    """

    call_id: str
    prompt_ids: array[int]
    sampling: Mapping[str, Any]
    key: str = ""
    produced: array[int] = field(default_factory=lambda: tokens(()))

    @property
    def affinity(self) -> str:
        return self.key or blake2b(self.prompt_ids[:PREFIX].tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens new since the last piece: ids int32 [N], logprobs float32 [N], of one weight version and replica.

    The last piece of a call, and only it, has a `finish`; `error` is why when that is FAILED. A piece without
    ids has no meaningful version and replica.
    """

    ids: array[int]
    logprobs: array[float]
    version: int
    replica: str
    finish: Finish | None = None
    stop_reason: int | str | None = None
    top: tuple[TopLogprobs, ...] | None = None
    error: CallError | None = None


class CallProgress:
    """How far a call is."""

    def __init__(self, call: Call, *, max_losses: int, grammars_resume: bool) -> None:
        self.call = call
        self.produced = call.produced[:]
        self.finish: Finish | None = None
        self._max_losses, self._grammars_resume = max_losses, grammars_resume
        self._attempts = self._carried = self._losses = self._version = 0
        self._replica = ""

    def request(self) -> EngineRequest:
        """The next request: prompt, what is produced, and what may still be."""
        name = f"{self.call.call_id}#{self._attempts}"
        self._attempts, self._carried = self._attempts + 1, len(self.produced)
        if not self.produced:
            return EngineRequest(name, self.call.prompt_ids, self.call.sampling, kin=self.call.key)
        prompt = self.call.prompt_ids + self.produced
        return EngineRequest(name, prompt, self._remaining(), len(self.produced), self.call.key)

    def take(self, delta: Delta, replica: str) -> Piece | None:
        """The piece a delta makes, or None when there is nothing to tell."""
        if delta.ids:
            self._version, self._replica = delta.version, replica
            self.produced.extend(delta.ids)
        error = None
        if delta.finish is not None:
            self.finish = FINISHES.get(delta.finish)
        if self.finish is Finish.FAILED:
            error = CallRefusedError(self.call.call_id, f"replica {replica} says: {delta.stop_reason}")
        if not delta.ids and self.finish is None:
            return None
        stop = None if error else delta.stop_reason
        return Piece(delta.ids, delta.logprobs, delta.version, replica, self.finish, stop, delta.top, error)

    def resumed(self) -> Piece | None:
        """Before the first request: the call's last piece if what it came with leaves nothing to be done."""
        return self.cut(None) if self.produced else None

    def cut(self, unexplained: str | None) -> Piece | None:
        """After a cut: the call's last piece if it cannot go on. What nobody asked for counts if no token came."""
        if self.finish is not None:
            return None
        if self._budget() == 0:
            return self._last(Finish.LENGTH)
        if self.produced and self.call.sampling.get("structured_outputs") and not self._grammars_resume:
            reason = f"cut after {len(self.produced)} tokens of a grammar, which cannot be resumed elsewhere"
            return self.fail(CallGrammarError(self.call.call_id, reason))
        if len(self.produced) > self._carried:
            self._losses = 0
        elif unexplained is not None:
            self._losses += 1
        if self._losses > self._max_losses:
            reason = f"{self._losses} times in a row without a token, last: {unexplained}"
            return self.fail(CallLossesError(self.call.call_id, reason))
        return None

    def fail(self, error: CallError) -> Piece:
        """The last piece of a call that cannot go on."""
        return self._last(Finish.FAILED, error)

    def _last(self, finish: Finish, error: CallError | None = None) -> Piece:
        self.finish = finish
        return Piece(tokens(()), logprobs(()), self._version, self._replica, finish, error=error)

    def _budget(self) -> int | None:
        """Tokens that may still be generated; None: as many as the model's length allows."""
        limit = self.call.sampling.get("max_tokens")
        return None if limit is None else max(0, limit - len(self.produced))

    def _remaining(self) -> dict[str, Any]:
        sampling = {**self.call.sampling, "max_tokens": self._budget()}
        if sampling.get("min_tokens"):
            sampling["min_tokens"] = max(0, sampling["min_tokens"] - len(self.produced))
        if sampling.get("seed") is not None:
            sampling["seed"] = derived_seed(sampling["seed"], len(self.produced))
        return sampling


def derived_seed(seed: int, produced: int) -> int:
    """A seed for the continuation after that many tokens, 0 to 2^63 - 1: the first seed would repeat its noise."""
    digest = blake2b(f"{seed}#{produced}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
        progress = CallProgress(call, max_losses=self._max_losses, grammars_resume=self._grammars_resume)
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

    async def _attempt(self, progress: CallProgress, ticket: int) -> AsyncGenerator[Piece, None]:
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

    async def _pieces(self, progress: CallProgress, lease: Lease) -> AsyncGenerator[Piece, None]:
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
