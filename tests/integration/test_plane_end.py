"""The end of a plane's callers, which comes before its own: none of their calls is open any more."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from plane_cases import Plane, plane

from seamless_verl.trainer.data_plane.answers import answered

pytestmark = pytest.mark.integration


async def running(plane: Plane, number: int) -> dict[str, float]:
    """The plane's metrics, once so many calls run."""
    while (metrics := await plane.first.metrics.remote())["calls/running"] != number:
        pass  # bounded by the caller's timeout
    return dict(metrics)


async def cancelled(call: Any, plane: Plane, *, cut: bool) -> None:
    """Somebody who waited for the call, and was told not to while it ran."""
    waiting = asyncio.ensure_future(answered(call, cut=cut))
    await running(plane, 1)
    waiting.cancel()
    await asyncio.wait([waiting], timeout=30)
    assert waiting.cancelled()


def test_whoever_waits_no_longer_has_no_call_open(nano: Path, tmp_path: Path) -> None:
    with plane(nano / "model", tmp_path, replicas=1, delay_s=0.05) as one:
        one.commit(1)
        asyncio.run(asyncio.wait_for(waited(one), 120))
        one.link.stop()


async def waited(one: Plane) -> None:
    await cancelled(one.first.generate.remote("long", [1, 2], {"max_tokens": 1000}), one, cut=True)
    metrics = await running(one, 0)
    assert (metrics["calls/cancelled"], metrics["calls/begun"]) == (1, 1) and metrics["calls/tokens"] < 1000
    await cancelled(one.first.generate.remote("short", [1, 2], {"max_tokens": 20}), one, cut=False)
    metrics = await one.first.metrics.remote()
    assert metrics["calls/running"] == 0 and metrics["calls/length"] == 1, "it was waited for"
    assert await one.servers[0].running.remote() == 0
