"""One request of an agent, from its arrival to its reply: what the layers of vLLM between our own carry along.

The serving classes know nothing of sessions, so the request travels in a context variable, which every task
started on its behalf inherits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from seamless_verl.gateway.prefix_index import PrefixMatch
from seamless_verl.gateway.retries import Attempt, CallOutput
from seamless_verl.gateway.session import Session
from seamless_verl.journal import StoredCall


@dataclass(frozen=True)
class Rendered:
    """What a conversation was rendered from: the API's request as vLLM's chat form, and the parser of its reply.

    `known` is the recorded beginning its prompt was built on, if any; `settings` are the chat template's.
    """

    request: Any
    messages: Sequence[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None
    parser: Any
    settings: Mapping[str, Any]
    seed: bytes
    known: PrefixMatch | None = None


@dataclass(eq=False)
class RequestContext:
    """A request under way. `attempt` has its calls' tapes; `repeats` when another request began them."""

    session: Session
    number: int
    path: str
    body: Mapping[str, Any]
    digest: str
    attempt: Attempt
    repeats: bool = False
    rendered: Rendered | None = None
    calls: int = field(default=0)

    def next_call(self) -> tuple[int, str]:
        """The next call's place in the request, and its id, unique in its session."""
        place = self.calls
        self.calls += 1
        name = f"{self.session.session_id}.{self.number}"
        return place, f"{name}-{place}" if place else name

    def earlier(self, place: int) -> CallOutput | None:
        """What a repeated request's call is read from; None where it has to run."""
        tape = self.attempt.tapes.get(place) if self.repeats else None
        return None if tape is None or tape.broken else tape

    def cut(self, place: int) -> StoredCall | None:
        """The call a restart cut at this place, which goes on now."""
        return self.attempt.cuts.pop(place, None) if self.repeats else None

    def normalized(self) -> dict[str, Any]:
        """The request as the record keeps it: what a conversation was rendered from, or a plain completion's body."""
        if self.rendered is None:
            return {"path": self.path, **self.body}
        kept: dict[str, Any] = {"path": self.path, "messages": list(self.rendered.messages)}
        if self.rendered.tools:
            kept["tools"] = self.rendered.tools
        if self.rendered.settings:
            kept["template"] = dict(self.rendered.settings)
        return kept


CURRENT: ContextVar[RequestContext | None] = ContextVar("exchange", default=None)


def current() -> RequestContext:
    """The request this task works for; raises LookupError outside of one."""
    exchange = CURRENT.get()
    if exchange is None:
        raise LookupError("no session's request runs here: tokens without a session would be lost to the record")
    return exchange


def digest_of(path: str, body: Mapping[str, Any]) -> str:
    """Equal for requests of equal content, however their JSON is written; raises UnicodeEncodeError for text that
    is no Unicode."""
    canonical = json.dumps([path, body], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return blake2b(canonical.encode(), digest_size=16).hexdigest()
