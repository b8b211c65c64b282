"""Images of a request are decoded beside the engine's event loop, which goes on meanwhile."""

from __future__ import annotations

import asyncio
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.engine import EngineRequest, PauseMode
from seamless_verl.trajectory.records import Finish, TokenChunk, tokens

pytestmark = pytest.mark.integration
BEGUN, MAY_END = threading.Event(), threading.Event()


def decoded() -> dict[str, Any]:
    BEGUN.set()
    assert MAY_END.wait(30), "nothing went on meanwhile"
    return {}


class Slow:
    def __reduce__(self) -> tuple[Any, ...]:
        return decoded, ()


@pytest.mark.parametrize("by_pause", [True, False])
async def test_a_pause_or_an_abort_while_images_are_decoded_cuts_the_request(by_pause: bool) -> None:
    """Before it is sent: the engine of this source has no method to send it to."""
    BEGUN.clear()
    MAY_END.clear()
    source = AsyncLLMSource(SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=None)), 3)  # type: ignore[arg-type]
    request = EngineRequest("r", tokens([1]), {}, media=pickle.dumps(Slow()))

    async def ask() -> list[TokenChunk]:
        return [chunk async for chunk in source.generate(request)]

    asked = asyncio.create_task(ask())
    assert await asyncio.to_thread(BEGUN.wait, 30)
    if by_pause:
        source.paused = PauseMode.ABORT
    else:
        await source.abort("r")
    MAY_END.set()
    (chunk,) = await asked
    assert (chunk.finish_reason, chunk.version, len(chunk.ids)) == (Finish.CUT, 3, 0)
