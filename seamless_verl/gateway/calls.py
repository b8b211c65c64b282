"""The call of a session, what the record keeps of it besides its tokens, and where its tokens come from."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from seamless_verl.journal import StoredCall
from seamless_verl.rollout.call import Call
from seamless_verl.trajectory.records import TokenChunk

GATEWAY_KEY = "gateway"
"""The key of a stored request under which the gateway keeps what it needs to find its call again."""
ASKED, RESPONSE = "asked", "response"
"""Under that key: the digest of what the call asked, and the stored response that it makes."""


@dataclass(frozen=True, slots=True)
class SessionCall(Call):
    """A call with what the recorder stores of it; a request for n choices is n calls."""

    session_id: str = ""
    digest: str = ""  # of the request's content
    request: dict[str, Any] = field(default_factory=dict)  # what the model was asked: chat messages of a conversation
    attempt: int = 0  # numbers the session's request that it belongs to; with index and key a retry finds the call
    index: int = 0  # its place in that request
    idempotency_key: str | None = None
    timed: bool = True
    response: Mapping[str, Any] | None = None  # `id`, `model`, and whether the messages begin with `instructions`
    dropped_tools: tuple[str, ...] = ()  # types of hosted tools that were left out
    replaced_media: tuple[str, ...] = ()  # kinds of images and the like that became placeholders
    reply_id: str = ""  # the id that the reply has, or the beginning of it, as it was made
    asked: str = ""  # the digest of what was asked (`repeated_calls.py`)

    def stored_request(self) -> dict[str, Any]:
        """The request as it is recorded, with what finds the call again after a restart."""
        own: dict[str, Any] = {"attempt": self.attempt, "place": self.index}
        own |= {"max_tokens": self.sampling.get("max_tokens"), "reply_id": self.reply_id}
        given = {
            ASKED: self.asked or None,
            "key": self.idempotency_key,
            RESPONSE: None if self.response is None else dict(self.response),
            "dropped_tools": list(self.dropped_tools) or None,
            "replaced_media": list(self.replaced_media) or None,
        }
        own |= {name: value for name, value in given.items() if value is not None}
        return {**self.request, GATEWAY_KEY: own}


def gateway_fields(call: StoredCall) -> dict[str, Any]:
    """What the gateway keeps of a stored call."""
    own: dict[str, Any] = call.request.get(GATEWAY_KEY, {})
    return own


class CallSource(Protocol):
    """Runs a call to its end, over any number of replicas and pauses; a call with `produced` continues after that."""

    def stream(self, call: SessionCall) -> AsyncGenerator[TokenChunk, None]:
        """The call's chunks; the last one, and only it, has a finish reason.

        Closing the generator aborts the call in the engine.
        """
        ...
