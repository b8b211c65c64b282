"""Waiting for a plane's answer, so that no call, and no session, is open any more when nobody waits."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from seamless_verl.trajectory.session import Closed


async def answered(call: Any, *, cut: bool = False) -> Any:
    """What a method of a plane returns; `call` is its reference.

    Whoever is cancelled meanwhile goes on when the call has ended, which for one that may be `cut` is at once:
    Ray repeats what a plane has not answered, also for callers that wait no longer.
    """
    answer = asyncio.wrap_future(call.future())
    try:
        return await asyncio.shield(answer)
    except asyncio.CancelledError:
        if cut:
            ray.cancel(call, recursive=False)  # what it started, others may wait for too
        await asyncio.gather(answer, return_exceptions=True)  # nobody wants it any more
        raise


async def opened_session(plane: Any, opening: dict[str, Any]) -> dict[str, Any]:
    """A session of this plane; whoever is cancelled meanwhile leaves none open."""
    call = plane.open.remote(opening)
    try:
        opened: dict[str, Any] = await answered(call)
    except asyncio.CancelledError:
        (ended,) = await asyncio.gather(asyncio.wrap_future(call.future()), return_exceptions=True)
        if not isinstance(ended, BaseException):
            await left(plane, ended["session_id"], Closed.ABANDONED)
        raise
    return opened


async def left(plane: Any, session_id: str, reason: Closed) -> None:
    """The session ends so, and nothing of it is kept."""
    await answered(plane.close.remote(session_id, reason))
    await answered(plane.handed.remote(session_id, kept=False))
