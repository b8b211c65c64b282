"""A call's objects go when it ends, and do not wait for Python's collector: a busy gateway has hundreds."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from pathlib import Path

import openai
import pytest
from support.gateway import GatewayHarness, Reply, gateway_harness, user
from support.rollout import until

from seamless_verl.gateway.running_call import RunningCall
from seamless_verl.trajectory.records import Finish

pytestmark = pytest.mark.integration
HI = [user("hi")]


async def whole(harness: GatewayHarness) -> None:
    await harness.openai.chat.completions.create(model="nano", messages=HI, max_tokens=4)


async def streamed(harness: GatewayHarness) -> None:
    async for _ in await harness.openai.chat.completions.create(model="nano", messages=HI, max_tokens=4, stream=True):
        pass


async def left(harness: GatewayHarness) -> None:
    """By a client that goes away in the middle."""
    harness.source.replies = [Reply([104] * 8, hold=asyncio.Event())]
    stream = await harness.openai.chat.completions.create(model="nano", messages=HI, max_tokens=8, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: not harness.gateway.client._running)


async def failed(harness: GatewayHarness) -> None:
    harness.source.replies = [Reply([104] * 3, Finish.FAILED)]
    with pytest.raises(openai.APIError):
        await harness.openai.chat.completions.create(model="nano", messages=HI, max_tokens=4)


@pytest.mark.parametrize("call", [whole, streamed, left, failed])
async def test_a_call_that_has_ended_is_freed_without_a_collection(
    nano: Path, call: Callable[[GatewayHarness], Awaitable[None]]
) -> None:
    async with gateway_harness(nano) as harness:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await call(harness)
            await harness.drain()
            alive = sum(isinstance(one, RunningCall) for one in gc.get_objects())
        finally:
            gc.enable()
    assert alive <= 1, "but for the last one, which a connection may still have"
