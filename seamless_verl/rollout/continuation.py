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
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from seamless_verl.errors import CallError, CallGrammarError, CallLossesError, CallRefusedError
from seamless_verl.rollout.engine import Delta, EngineFinish, EngineRequest, TopLogprobs
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


class Progress:
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
