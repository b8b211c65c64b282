"""Interfaces between the gateway and its surroundings: the call, the source of its tokens, and the recorder."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from seamless_verl.rollout.call import Call
from seamless_verl.trajectory.records import Finish, TokenChunk

if TYPE_CHECKING:
    from seamless_verl.gateway.api_errors import ApiError
    from seamless_verl.gateway.session import Session


@dataclass(frozen=True, slots=True)
class SessionCall(Call):
    """A call with what the recorder stores of it; a request for n choices is n calls.

    `digest` is of the request's content. `request` is what the model was asked, as normalized chat messages where it
    is a conversation. `attempt` numbers the session's request that the call belongs to, and `index` is its place in
    that request; with `idempotency_key` they let a retry find the call after a restart too. `response` names the stored
    response that the call makes: its `id`, its `model`, and whether the messages begin with `instructions`.
    `dropped_tools` are the types of hosted tools that were left out, and `replaced_media` the kinds of images and the
    like that became placeholders. `reply_id` is the id that the reply has, or the beginning of it, as it was made.
    `asked` is the digest of what was asked (`repeated_calls.py`).
    """

    session_id: str = ""
    digest: str = ""
    request: dict[str, Any] = field(default_factory=dict)
    attempt: int = 0
    index: int = 0
    idempotency_key: str | None = None
    timed: bool = True
    response: Mapping[str, Any] | None = None
    dropped_tools: tuple[str, ...] = ()
    replaced_media: tuple[str, ...] = ()
    reply_id: str = ""
    asked: str = ""


class CallSource(Protocol):
    """Runs a call to its end, over any number of replicas and pauses; a call with `produced` continues after that."""

    def stream(self, call: SessionCall) -> AsyncGenerator[TokenChunk, None]:
        """The call's chunks; the last one, and only it, has a finish reason.

        Closing the generator aborts the call in the engine.
        """
        ...


class Recorder(Protocol):
    """Stores what happens in sessions.

    When an awaited method has returned, its content survives a crash, and only then may the agent see any of it.
    The agent sees a call's chunks, so a call's start may be stored with its first chunk. The agent sees the last
    chunk after the call's end, so that chunk may be stored with the end.
    """

    async def open_session(self, session: Session) -> None: ...

    async def start_call(self, call: SessionCall) -> None: ...

    def buffer_chunk(self, call: SessionCall, chunk: TokenChunk) -> None:
        """For a chunk that is not the last, and that nobody sees before a later one; it is stored with that one."""

    async def record_chunk(self, call: SessionCall, chunk: TokenChunk) -> None: ...

    async def end_call(self, call: SessionCall, finish: Finish, reply: dict[str, Any]) -> None:
        """The call has all its tokens; `reply` is what the agent is going to read."""

    async def post_reward(self, session: Session, name: str, value: float) -> None:
        """Raises ApiError when the session accepts no more rewards."""

    def find_turn(self, session: Session, reply_id: str) -> str | None:
        """The id of the turn that the agent got as the reply of this id; None if there is none on record."""
        ...

    def note_refusal(self, session: Session, path: str, status: int, message: str) -> None:
        """Stores that a request got an error; nobody waits for it."""

    async def close_session(self, session: Session, reason: str) -> None: ...


class OutsideApi(Protocol):
    """Serves programs outside of the run, below `/runner/`, and records what such programs are refused."""

    async def handle(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to a request with a runner's key; raises ApiError."""
        ...

    async def refused(self, subject: str, error: ApiError) -> None:
        """A request of the admin API, of a runner, or with a reward was refused; `subject` is a session or a path."""


class NullRecorder:
    """A recorder for calls that are on record already: it stores nothing."""

    async def open_session(self, session: Session) -> None: ...

    async def start_call(self, call: SessionCall) -> None: ...

    def buffer_chunk(self, call: SessionCall, chunk: TokenChunk) -> None: ...

    async def record_chunk(self, call: SessionCall, chunk: TokenChunk) -> None: ...

    async def end_call(self, call: SessionCall, finish: Finish, reply: dict[str, Any]) -> None: ...

    async def post_reward(self, session: Session, name: str, value: float) -> None: ...

    def find_turn(self, session: Session, reply_id: str) -> str | None: ...

    def note_refusal(self, session: Session, path: str, status: int, message: str) -> None: ...

    async def close_session(self, session: Session, reason: str) -> None: ...
