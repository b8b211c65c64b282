"""Waiting for a plane's answer, so that no call is open any more when nobody waits."""

from __future__ import annotations

import asyncio
from typing import Any

import ray


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
            ray.cancel(call)
        await asyncio.gather(answer, return_exceptions=True)  # nobody wants it any more
        raise
