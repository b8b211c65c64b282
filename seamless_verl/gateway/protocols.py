"""What the gateway asks of the rooms below it: a source of tokens, and a keeper of the record."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from seamless_verl.rollout.call import Call, Piece
from seamless_verl.trajectory.records import Finish

if TYPE_CHECKING:
    from seamless_verl.gateway.sessions import Session


@dataclass(frozen=True, slots=True)
class SessionCall(Call):
    """A call with what the record needs of it; a request for n choices is n calls.

    `digest` is of the request's content, for retries; `request` is what the model was asked, normalized to chat
    messages where it is a conversation. `attempt`, `place` and `idempotency_key` say which request of the session
    it came with, and where in it, so that a retry finds it after a restart too.
    """

    session_id: str = ""
    digest: str = ""
    request: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    place: int = 0
    idempotency_key: str | None = None


class CallSource(Protocol):
    """Runs one call to its end over however many replicas and pauses it takes; one with `produced` from there on."""

    def stream(self, call: SessionCall) -> AsyncGenerator[Piece, None]:
        """The call's pieces, the last with its finish; closing the generator aborts the call in the engine."""
        ...


class Recorder(Protocol):
    """Keeps the record. What has returned is kept for good, and only then does the agent see anything of it.

    What is shown of a call is its pieces, so its start may be kept with the first of them, and the last of them, which
    is shown after the call's end, with that.
    """

    async def opened(self, session: Session) -> None: ...

    async def started(self, call: SessionCall) -> None: ...

    def noted(self, call: SessionCall, piece: Piece) -> None:
        """A piece that is not the call's last and that nobody is to be shown before a later one; kept with that."""

    async def piece(self, call: SessionCall, piece: Piece) -> None: ...

    async def ended(self, call: SessionCall, finish: Finish, reply: dict[str, Any]) -> None:
        """The call has all its tokens; `reply` is what the agent is going to read."""

    async def rewarded(self, session: Session, name: str, value: float) -> None:
        """Raises Refusal where the session takes no rewards any more."""

    async def closed(self, session: Session, reason: str) -> None: ...


class NullRecorder:
    """A recorder for what is on record already."""

    async def opened(self, session: Session) -> None: ...

    async def started(self, call: SessionCall) -> None: ...

    def noted(self, call: SessionCall, piece: Piece) -> None: ...

    async def piece(self, call: SessionCall, piece: Piece) -> None: ...

    async def ended(self, call: SessionCall, finish: Finish, reply: dict[str, Any]) -> None: ...

    async def rewarded(self, session: Session, name: str, value: float) -> None: ...

    async def closed(self, session: Session, reason: str) -> None: ...
