"""The admin API: opens, shows and closes sessions, and accepts their rewards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeAlias, TypeVar

from annotated_types import Len

from seamless_verl.errors import ConfigError, shorten
from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.session import Session, SessionLimits, SessionSampling, SessionState
from seamless_verl.gateway.sessions import SessionTable
from seamless_verl.runtime.fields import Text, read, read_value
from seamless_verl.runtime.scores import score_of
from seamless_verl.trajectory.turns import turn_reward_name

T = TypeVar("T")
CancelCalls: TypeAlias = Callable[[str], Awaitable[None]]
"""Cancels the running calls of a session; returns when they are on record as cancelled."""

Name: TypeAlias = Annotated[str, Len(1, 200)]
OPEN_FIELDS = ("uid", "limits", "sampling", "metadata")


class Admin:
    """The admin API without its HTTP; `url` is the gateway's address for agents, without a slash at its end."""

    def __init__(self, table: SessionTable, recorder: JournalRecorder, *, cancel: CancelCalls, url: str = "") -> None:
        self._table, self._recorder, self._cancel, self.url = table, recorder, cancel, url

    async def handle(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """GET and POST /admin/sessions, GET /admin/sessions/<id>, POST to its /close and /reward; raises ApiError."""
        match method, path.strip("/").split("/")[1:]:
            case "POST", ["sessions"]:
                return await self.open(body)
            case "GET", ["sessions"]:
                return {"sessions": [session.describe() for session in self._table]}
            case "POST", ["sessions", session_id, "reward"]:
                return await self.reward(self._table.get(session_id), body)
            case "GET", ["sessions", session_id]:
                return self._table.describe(session_id)
            case "POST", ["sessions", session_id, "close"]:
                return await self.close(session_id, body.get("reason", "finished"))
        raise ApiError(ErrorCode.NOT_FOUND, f"Nothing is served at {method} {path}")

    async def open(self, body: dict[str, Any], *, awaited: bool = False) -> dict[str, Any]:
        """Opens a session; returns its id, its key (only now), and the base URLs that contain the key.

        `awaited`: an agent loop of the run waits for its end. Raises ApiError with all mistakes of the body.
        """
        wrong, names = _Mistakes(), ", ".join(OPEN_FIELDS)
        for name in (name for name in body if name not in OPEN_FIELDS):
            wrong.append(ConfigError(name, body[name], "there is no such setting", f"Choose from {names}"))
        uid = wrong.value(Text, body.get("uid"), "uid", "Name the prompt that the session runs on")
        if not isinstance(metadata := body.get("metadata", {}), dict):
            wrong.append(ConfigError("metadata", metadata, "must be an object", "Give one, or leave it out"))
        limits = wrong.of(SessionLimits(), lambda: read(SessionLimits, body.get("limits"), key="limits"))
        sampling = wrong.of(SessionSampling(), lambda: read(SessionSampling, body.get("sampling"), key="sampling"))
        wrong.refuse()
        session, key = self._table.open(uid, limits=limits, sampling=sampling, metadata=metadata, awaited=awaited)
        try:
            await self._recorder.open_session(session)
        except BaseException:  # the caller gets no id, so nobody would ever close it
            self._table.close(session.session_id, "its opening is not on record")
            self._table.forget(session.session_id)
            raise
        base = f"{self.url}/s/{key}"
        urls = {"base_url": f"{base}/v1", "anthropic_base_url": base}
        return {"session_id": session.session_id, "key": key, **urls}

    async def close(self, session_id: str, reason: Any) -> dict[str, Any]:
        """Closes a session, after its running calls are cancelled; closing it again changes nothing."""
        if not isinstance(reason, str):
            raise ApiError(ErrorCode.MALFORMED, f"reason={reason!r}: give a text", param="reason")
        described = self._table.describe(session_id)
        if described["state"] == SessionState.OPEN and self._table.close(session_id, reason):
            session = self._table.get(session_id)
            await self._cancel(session_id)
            await self._recorder.close_session(session, reason)
            return session.describe()
        return described

    async def expire(self) -> int:
        """Ends the sessions whose lifetime is over, on the record too; returns their number."""
        expired = self._table.expire()
        for session in expired:
            await self._cancel(session.session_id)
            await self._recorder.close_session(session, session.reason)
        return len(expired)

    async def reward(self, session: Session, body: dict[str, Any]) -> dict[str, Any]:
        """Records `reward`, a finite number, under `name`, which takes one; the same again changes nothing.

        With `call`, the id of a reply, it is the reward of that turn alone.
        """
        wrong = _Mistakes()
        value = wrong.of(0.0, lambda: _finite(body.get("reward")))
        way_out = "Give 1 to 200 characters, or leave it out"
        name = wrong.value(Name, body.get("name", "reward"), "name", way_out)
        way_out = "Give the id of a reply of this session, or leave it out"
        call = wrong.value(Name | None, body.get("call"), "call", way_out)
        wrong.refuse()
        if session.state is not SessionState.OPEN:
            code = ErrorCode.EXPIRED if session.state is SessionState.EXPIRED else ErrorCode.CLOSED
            message = f"Session {session.session_id} is {session.state} ({session.reason}): it takes no reward any more"
            raise ApiError(code, message)
        stored = name if call is None else turn_reward_name(self._find_turn(session, call), name)
        if session.rewards.setdefault(stored, value) != value:
            message = f"Session {session.session_id} has the reward {stored}={session.rewards[stored]} already"
            raise ApiError(ErrorCode.REWARDED, message, param="reward")
        await self._recorder.post_reward(session, stored, value)
        of_call = {} if call is None else {"call": call}
        return {"session_id": session.session_id, "name": name, "reward": value, **of_call}

    def _find_turn(self, session: Session, call: str) -> str:
        turn_id = self._recorder.find_turn(session, call)
        if turn_id is None:
            message = f"call={call!r}: session {session.session_id} has given no reply of this id. Give the `id` of one"
            raise ApiError(ErrorCode.MALFORMED, message, param="call")
        return turn_id


class _Mistakes(list[ConfigError]):
    """The mistakes of a body, which are said all at once."""

    def of(self, instead: T, read_part: Callable[[], T]) -> T:
        """The part of the body; where it is wrong, what stands `instead` of it."""
        try:
            return read_part()
        except ConfigError as error:
            self += error.mistakes
            return instead

    def value(self, kind: Any, value: object, key: str, way_out: str) -> Any:
        return self.of(None, lambda: read_value(kind, value, key=key, way_out=way_out))

    def refuse(self) -> None:
        """Raises one ApiError with all mistakes, if there are any; its `param` is the first."""
        if self:
            message = "\n".join(map(shorten, self))  # a value may be a whole body
            raise ApiError(ErrorCode.MALFORMED, message, param=self[0].key)


def _finite(value: object) -> float:
    try:
        return score_of(value)
    except ValueError as error:
        raise ConfigError("reward", value, "is no finite number", "Give a finite number") from error
