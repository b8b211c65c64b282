"""A call's objects go when it ends, and do not wait for Python's collector: a busy gateway has hundreds."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from support.gateway import gateway_harness, user

from seamless_verl.gateway.running_call import RunningCall

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_has_ended_is_freed_without_a_collection(nano: Path, stream: bool) -> None:
    async with gateway_harness(nano) as harness:
        gc.collect()
        gc.disable()
        try:
            for _ in range(4):
                asked = {"model": "nano", "messages": [user("hi")], "max_tokens": 4}
                if stream:
                    async for _ in await harness.openai.chat.completions.create(**asked, stream=True):  # type: ignore[call-overload]
                        pass
                else:
                    await harness.openai.chat.completions.create(**asked)  # type: ignore[call-overload]
            await harness.drain()
            left = sum(isinstance(one, RunningCall) for one in gc.get_objects())
        finally:
            gc.enable()
    assert left <= 1, "but for the last one, which a connection may still have"
