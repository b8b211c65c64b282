"""Generation calls: each runs to its end, over however many replicas and pauses that takes.

`Calls` runs them over a fleet; `CallProgress` is what is known of one of them between two requests to replicas.

Invariants:
- Every call that began has exactly one outcome, or is running; one whose client went away is CANCELLED.
- A call holds a slot from before its request is sent until the engine has ended it or it was aborted.
- A call waits by its conversation's age, also after a cut: what has begun ends before more begins.
- `produced` is the ids of all chunks in order, after those the call came with. Each request's prompt is the call's
  prompt and all of that, and its budgets are the call's less what is produced.
- A call's `finish` is set once.

What a continuation cannot carry: the engine sees the produced tokens as prompt, so presence and frequency penalties
(which count generated tokens only) start anew unless the engine reads `resumed_tokens`. Neither can it carry the
state of a grammar: an engine advances a new one over the resumed tokens, which `grammars_resume` says ours do. Where
they do not, a call that was cut after its first token fails with its reason, rather than be completed into text that
breaks the grammar.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
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
from seamless_verl.rollout.engine import EngineRequest
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.rollout.replica import Lease
from seamless_verl.trajectory.records import Finish, TokenChunk, empty_chunk, tokens

PREFIX = 256  # tokens of the prompt that stand for it: the system prompt and tools tell agents apart
REMEMBERED = 16_384  # conversations whose age is known; a forgotten one counts as new
CUT_SILENTLY = empty_chunk(Finish.CUT)  # what an engine that ends its stream without a finish reason has done


@dataclass(frozen=True, slots=True)
class Call:
    """What an agent asked for: prompt_ids int32 [P], and vLLM's sampling fields as plain values.

    Calls with the same `key`, a session's name, prefer the same replica; without one the beginning of the prompt is
    the key. `produced` int32 is what it generated before the process that ran it died: it continues after that,
    within its budget.
    """

    call_id: str
    prompt_ids: array[int]
    sampling: Mapping[str, Any]
    key: str = ""
    produced: array[int] = field(default_factory=lambda: tokens(()))

    @property
    def affinity(self) -> str:
        return self.key or blake2b(self.prompt_ids[:PREFIX].tobytes(), digest_size=8).hexdigest()


class CallProgress:
    """How far one call is: what it has produced, and what its next request to a replica asks for."""

    def __init__(self, call: Call, *, max_losses: int, grammars_resume: bool) -> None:
        self.call = call
        self.produced = call.produced[:]
        self.finish: Finish | None = None
        self._max_losses, self._grammars_resume = max_losses, grammars_resume
        self._attempts = self._resumed_tokens = self._losses = self._version = 0
        self._replica = ""

    def next_request(self) -> EngineRequest:
        """Prompt, what is produced, and the budget that is left."""
        name = f"{self.call.call_id}#{self._attempts}"
        self._attempts, self._resumed_tokens = self._attempts + 1, len(self.produced)
        if not self.produced:
            return EngineRequest(name, self.call.prompt_ids, self.call.sampling, conversation=self.call.key)
        prompt = self.call.prompt_ids + self.produced
        return EngineRequest(name, prompt, self._remaining_sampling(), len(self.produced), self.call.key)

    def add(self, chunk: TokenChunk) -> TokenChunk | None:
        """Takes an engine's chunk; returns what the caller is given, None when there is nothing to give."""
        if chunk.ids:
            self._version, self._replica = chunk.version, chunk.replica
            self.produced.extend(chunk.ids)
        if chunk.finish_reason is Finish.CUT:  # which is no end of the call
            return replace(chunk, finish_reason=None, stop_reason=None) if chunk.ids else None
        self.finish = chunk.finish_reason
        if self.finish is Finish.FAILED:
            why = f"replica {chunk.replica} says: {chunk.stop_reason}"
            return replace(chunk, stop_reason=None, error=CallRefusedError(self.call.call_id, why))
        return chunk if chunk.ids or self.finish else None

    def end_if_complete(self) -> TokenChunk | None:
        """Before the first request: the last chunk of a call whose earlier tokens already use up its budget."""
        return self.end_if_stuck(None) if self.produced else None

    def end_if_stuck(self, unexplained: str | None) -> TokenChunk | None:
        """After a cut: the call's last chunk if it cannot continue.

        `unexplained` says what happened where nobody asked for the cut; too many of those in a row without a token
        fail the call.
        """
        if self.finish is not None:
            return None
        if self._budget() == 0:
            return self._end(Finish.LENGTH)
        if self.produced and self.call.sampling.get("structured_outputs") and not self._grammars_resume:
            reason = f"cut after {len(self.produced)} tokens of a grammar, which cannot be resumed elsewhere"
            return self._end(Finish.FAILED, CallGrammarError(self.call.call_id, reason))
        if len(self.produced) > self._resumed_tokens:
            self._losses = 0
        elif unexplained is not None:
            self._losses += 1
        if self._losses > self._max_losses:
            reason = f"{self._losses} times in a row without a token, last: {unexplained}"
            return self._end(Finish.FAILED, CallLossesError(self.call.call_id, reason))
        return None

    def _end(self, finish: Finish, error: CallError | None = None) -> TokenChunk:
        self.finish = finish
        return empty_chunk(finish, version=self._version, replica=self._replica, error=error)

    def _budget(self) -> int | None:
        """Tokens that may still be generated; None: as many as the model's length allows."""
        limit = self.call.sampling.get("max_tokens")
        return None if limit is None else max(0, limit - len(self.produced))

    def _remaining_sampling(self) -> dict[str, Any]:
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


class Calls:
    """Runs calls over a fleet.

    A call fails when `max_losses` + 1 replicas in a row are lost under it, or cut it on their own account,
    without one token. `grammars_resume`: the engines advance a grammar over the resumed tokens of a request.
    """

    def __init__(self, fleet: Fleet, *, max_losses: int = 8, grammars_resume: bool = False) -> None:
        self._fleet, self._max_losses, self._grammars_resume = fleet, max_losses, grammars_resume
        self._tickets = count()
        self._ticket = lru_cache(maxsize=REMEMBERED)(lambda key: next(self._tickets))
        self._begun = self._running = self._tokens = 0
        self._ended: Counter[Finish] = Counter()

    async def stream(self, call: Call) -> AsyncGenerator[TokenChunk, None]:
        """The call's tokens as they come; the last chunk says how it ended, FAILED with its `error`.

        Closing the generator ends the call as CANCELLED. Errors that are no replica's failure to serve, such as a
        defect of an engine, are raised, and the call counts as FAILED.
        """
        progress = CallProgress(call, max_losses=self._max_losses, grammars_resume=self._grammars_resume)
        ticket = self._ticket(call.key) if call.key else next(self._tickets)
        self._begun, self._running = self._begun + 1, self._running + 1
        try:
            if (last := progress.end_if_complete()) is not None:
                yield last
            while progress.finish is None:
                async with aclosing(self._attempt(progress, ticket)) as chunks:
                    async for chunk in chunks:
                        self._tokens += len(chunk.ids)
                        yield chunk
        except (GeneratorExit, asyncio.CancelledError):
            progress.finish = progress.finish or Finish.CANCELLED
            raise
        finally:
            self._running -= 1
            self._ended[progress.finish or Finish.FAILED] += 1

    def metrics(self) -> dict[str, float]:
        ended = {f"calls/{finish}": float(self._ended[finish]) for finish in Finish if finish is not Finish.CUT}
        return ended | {
            "calls/begun": float(self._begun),
            "calls/running": float(self._running),
            "calls/tokens": float(self._tokens),
        }

    def check_integrity(self) -> None:
        """Raises IntegrityError unless calls begun = running + ended."""
        if self._begun != (known := self._running + self._ended.total()):
            raise IntegrityError("calls running + ended", self._begun, known)

    async def _attempt(self, progress: CallProgress, ticket: int) -> AsyncGenerator[TokenChunk, None]:
        """What one replica gives, until the call's end or a cut."""
        lease: Lease | None = None
        try:
            lease = await self._fleet.acquire(progress.call.affinity, ticket)
            async with aclosing(self._chunks(progress, lease)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except ReplicaLostError as loss:
            assert lease is not None
            self._fleet.lost(lease.replica.replica_id, loss.reason, engine=lease.engine)
            if (last := progress.end_if_stuck(str(loss))) is not None:
                yield last
        finally:
            if lease is not None:
                lease.release()

    async def _chunks(self, progress: CallProgress, lease: Lease) -> AsyncGenerator[TokenChunk, None]:
        if not lease.attached:  # dropped between its grant and this task's turn
            return
        finish_reason, unexplained = None, None
        async with aclosing(lease.engine.generate(progress.next_request())) as chunks:
            while finish_reason is None:
                chunk = await anext(chunks, CUT_SILENTLY)
                if (finish_reason := chunk.finish_reason) is not None:
                    replica = lease.replica.replica_id
                    unexplained = f"cut by replica {replica}, which was not paused" if lease.unexplained else None
                    lease.release()  # a client that is slow to take the rest holds no slot
                if (given := progress.add(chunk)) is not None:
                    yield given
        if (last := progress.end_if_stuck(unexplained)) is not None:
            yield last
