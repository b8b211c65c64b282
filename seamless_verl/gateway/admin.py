"""The admin API: opens, shows and closes sessions, and accepts their rewards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
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
                self._table.check_room()
                return await self.open(body)
            case "GET", ["sessions"]:
                return {"sessions": [session.describe() for session in self._table]}
            case "POST", ["sessions", session_id, "reward"]:
                return await self.reward(self._table.get(session_id), body)
            case "GET", ["sessions", session_id]:
                return self._table.get(session_id).describe()
            case "POST", ["sessions", session_id, "close"]:
                return await self.close(session_id, body.get("reason", "finished"))
        raise ApiError(ErrorCode.NOT_FOUND, f"Nothing is served at {method} {path}")

    async def open(self, body: dict[str, Any], *, awaited: bool = False) -> dict[str, Any]:
        """Opens a session; returns its id, its key (only now), and the base URLs that contain the key.

        `awaited`: an agent loop of the run waits for its end. Raises ApiError with all mistakes of the body.
        """
        reader = _BodyReader(body, OPEN_FIELDS)
        uid = reader.value(Text, "uid", way_out="Name the prompt that the session runs on")
        metadata = reader.mapping("metadata")
        limits = reader.settings(SessionLimits, "limits")
        sampling = reader.settings(SessionSampling, "sampling")
        reader.refuse_mistakes()
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
        session = self._table.get(session_id)
        if self._table.close(session_id, reason):
            await self._cancel(session_id)
            await self._recorder.close_session(session, reason)
        return session.describe()

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
        reader = _BodyReader(body)
        value = reader.score("reward")
        name = reader.value(Name, "name", default="reward", way_out="Give 1 to 200 characters, or leave it out")
        call = reader.value(Name | None, "call", way_out="Give the id of a reply of this session, or leave it out")
        reader.refuse_mistakes()
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


class _BodyReader:
    """Reads the fields of a JSON body, and collects its mistakes; None as `names` accepts any further fields."""

    def __init__(self, body: Mapping[str, Any], names: Sequence[str] | None = None) -> None:
        self._body = body
        unknown = [] if names is None else [name for name in body if name not in names]
        choices = f"Choose from {', '.join(names or ())}"
        self._mistakes = [ConfigError(name, body[name], "there is no such setting", choices) for name in unknown]

    def value(self, kind: Any, name: str, *, way_out: str, default: Any = None) -> Any:
        try:
            return read_value(kind, self._body.get(name, default), key=name, way_out=way_out)
        except ConfigError as error:
            self._mistakes.append(error)
            return default

    def score(self, name: str) -> float:
        value = self._body.get(name)
        try:
            return score_of(value)
        except ValueError:
            self._mistakes.append(ConfigError(name, value, "is no finite number", "Give a finite number"))
            return 0.0

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._body.get(name, {})
        if not isinstance(value, dict):
            self._mistakes.append(ConfigError(name, value, "must be an object", "Give one, or leave it out"))
            return {}
        return value

    def settings(self, kind: type[T], name: str) -> T:
        try:
            return read(kind, self._body.get(name), key=name)
        except ConfigError as error:
            self._mistakes += error.mistakes
            return kind()

    def refuse_mistakes(self) -> None:
        """Raises one ApiError with all mistakes; its `param` is the first."""
        if self._mistakes:
            message = "\n".join(shorten(mistake) for mistake in self._mistakes)  # a value may be a whole body
            raise ApiError(ErrorCode.MALFORMED, message, param=self._mistakes[0].key)
