"""Opening, looking at and closing sessions, and their rewards: what the trainer's side asks of the gateway."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from seamless_verl.gateway.api_errors import ApiError, ErrorCode
from seamless_verl.gateway.protocols import Recorder
from seamless_verl.gateway.session import SessionLimits, SessionSampling, parse
from seamless_verl.gateway.sessions import Session, SessionTable

Cancel: TypeAlias = Callable[[str], Awaitable[None]]
"""Ends the calls that run in a session; returns when they are on record as cancelled."""

OPENING = ("uid", "limits", "sampling", "metadata")


class Admin:
    """The admin API without its HTTP; `url` is what agents reach the gateway at, without a slash at its end."""

    def __init__(self, table: SessionTable, recorder: Recorder, *, cancel: Cancel, url: str = "") -> None:
        self._table, self._recorder, self._cancel, self.url = table, recorder, cancel, url

    async def handle(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST /admin/sessions, GET /admin/sessions/<id>, POST /admin/sessions/<id>/close; raises Refusal."""
        match method, path.strip("/").split("/")[1:]:
            case "POST", ["sessions"]:
                return await self.open(body)
            case "GET", ["sessions", session_id]:
                return self._table.get(session_id).view()
            case "POST", ["sessions", session_id, "close"]:
                return await self.close(session_id, body.get("reason", "finished"))
        raise ApiError(ErrorCode.NOT_FOUND, f"Nothing is served at {method} {path}")

    async def open(self, body: dict[str, Any]) -> dict[str, Any]:
        """A new session: its id, its key (told once), and the base URLs that carry the key."""
        uid, metadata = body.get("uid"), body.get("metadata", {})
        if not isinstance(uid, str) or not uid:
            raise ApiError(ErrorCode.MALFORMED, f"uid={uid!r}: name the prompt the session runs on", param="uid")
        if not isinstance(metadata, dict):
            raise ApiError(ErrorCode.MALFORMED, f"metadata={metadata!r}: give an object", param="metadata")
        if unknown := [name for name in body if name not in OPENING]:
            raise ApiError(ErrorCode.MALFORMED, f"{unknown[0]}: there is no such setting", param=unknown[0])
        limits = parse(SessionLimits, "limits", body.get("limits"))
        sampling = parse(SessionSampling, "sampling", body.get("sampling"))
        session, key = self._table.open(uid, limits=limits, sampling=sampling, metadata=metadata)
        try:
            await self._recorder.opened(session)
        except BaseException:  # nobody is told of it, so nobody would ever close it
            self._table.close(session.session_id, "its opening is not on record")
            self._table.forget(session.session_id)
            raise
        base = f"{self.url}/s/{key}"
        return {
            "session_id": session.session_id,
            "key": key,
            "base_url": f"{base}/v1",
            "anthropic_base_url": base,
        }

    async def close(self, session_id: str, reason: Any) -> dict[str, Any]:
        """Ends a session, and first the calls that run in it; again changes nothing."""
        if not isinstance(reason, str):
            raise ApiError(ErrorCode.MALFORMED, f"reason={reason!r}: give a text", param="reason")
        session = self._table.get(session_id)
        if self._table.close(session_id, reason):
            await self._cancel(session_id)
            await self._recorder.closed(session, reason)
        return session.view()

    async def expire(self) -> int:
        """Ends the sessions whose time is over, on the record too; how many."""
        due = self._table.expire()
        for session in due:
            await self._cancel(session.session_id)
            await self._recorder.closed(session, session.reason)
        return len(due)

    async def reward(self, session: Session, body: dict[str, Any]) -> dict[str, Any]:
        """A finite number, under a name."""
        value, name = body.get("reward"), body.get("name", "reward")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ApiError(ErrorCode.MALFORMED, f"reward={value!r}: give a finite number", param="reward")
        if not isinstance(name, str) or not name:
            raise ApiError(ErrorCode.MALFORMED, f"name={name!r}: give a name, or leave it out", param="name")
        await self._recorder.rewarded(session, name, float(value))
        return {"session_id": session.session_id, "name": name, "reward": float(value)}
