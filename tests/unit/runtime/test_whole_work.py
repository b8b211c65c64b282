"""What must be done whole is, whoever is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from seamless_verl.runtime.process import WholeWork


async def test_the_work_goes_on_when_its_caller_is_cancelled_and_can_be_waited_for() -> None:
    whole, release, done = WholeWork(), asyncio.Event(), list[str]()

    async def work() -> None:
        await release.wait()
        done.append("work")

    caller = asyncio.create_task(whole.do(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not done, "the caller leaves at once"
    release.set()
    await whole.ended()
    assert done == ["work"]
    await whole.ended()


async def test_a_caller_that_waits_gets_the_result_or_the_error() -> None:
    async def seven() -> int:
        return 7

    async def wrong() -> None:
        raise ValueError("wrong")

    whole = WholeWork()
    assert await whole.do(seven()) == 7
    with pytest.raises(ValueError, match="wrong"):
        await whole.do(wrong())
