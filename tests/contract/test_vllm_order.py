"""The order in which calls reach vLLM's engine: a load right after its pause, a resume right after a read of the clock.

Our server and vLLM's own client determine it together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.hosts import found

from seamless_verl.replica.engine_load import REAL_TIME_PRIORITY, load_paused, resume_and_time
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.resources.ledger.activity import Activity, DeviceUse
from seamless_verl.rollout.engine import PauseMode

PAUSE, RESUME, RPC = "pause_scheduler", "resume_scheduler", "collective_rpc"


class Sent:
    """vLLM's client without a socket: `methods` in the order in which they would go over it."""

    def __init__(self) -> None:
        self.methods: list[str] = []
        self.engine_core: Any = None  # as AsyncLLM has it
        self.client = object.__new__(found("vllm.v1.engine.core_client:AsyncMPClient", "engine-source"))
        self.client.client_index, self.client.core_engine, self.client.utility_results = 0, b"", {}
        self.client.encoder = SimpleNamespace(encode=lambda message: [message])
        self.client._send_input_message = self.send
        self.client._ensure_output_queue_task = lambda: None

    async def send(self, message: Any, engine: bytes, *objects: Any) -> None:
        self.methods.append(message[1][2])

    def reply(self, result: Any) -> None:
        """Replies to the oldest waiting call."""
        self.client.utility_results.pop(next(iter(self.client.utility_results))).set_result(result)


def engine_of(sent: Sent) -> Any:
    sent.engine_core = sent.client
    return SimpleNamespace(
        engine_core=sent.client,
        vllm_config=SimpleNamespace(kv_transfer_config=None),
        collective_rpc=sent.client.collective_rpc_async,
        resume_generation=partial(found("vllm.v1.engine.async_llm:AsyncLLM", "engine-source").resume_generation, sent),
    )


async def run_until_all_wait() -> None:
    """Runs until every task waits for a reply; nothing here waits for another process."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("parallel", "before_the_reply"), [(1, [PAUSE, RPC]), (2, [PAUSE])])
async def test_a_load_is_sent_right_after_its_pause_unless_engines_pause_together(
    parallel: int, before_the_reply: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.platforms import current_platform

    first = list[bool]()

    @contextmanager
    def real_time_priority() -> Iterator[None]:
        first.append(True)
        yield
        first.append(False)

    async def case() -> None:
        sent = Sent()
        source = AsyncLLMSource(engine := engine_of(sent), version=0)
        load = load_paused(
            engine,
            (1, 1 << 20),
            pause=partial(source.pause, PauseMode.KEEP),
            commit=partial(asyncio.sleep, 0),
            resume=source.resume,
            loading=partial(Activity("replica", ["device"]).doing, DeviceUse.SYNC),
            agreed=parallel > 1,
        )
        task = asyncio.create_task(load)
        await run_until_all_wait()
        assert sent.methods == before_the_reply and not first, "its last step is as usual"
        sent.reply(None)
        await run_until_all_wait()
        assert first == [True]
        sent.reply([5.0])
        await run_until_all_wait()
        assert sent.methods == [PAUSE, RPC, RPC, RESUME] and first == [True]
        sent.reply([7.0])
        sent.reply(None)
        assert await task == 2.0 and first == [True, False]

    monkeypatch.setattr(type(current_platform), REAL_TIME_PRIORITY, staticmethod(real_time_priority), raising=False)
    await asyncio.wait_for(case(), 30)


async def test_the_clock_is_read_right_before_the_resume() -> None:
    async with asyncio.timeout(30):
        sent = Sent()
        source = AsyncLLMSource(engine := engine_of(sent), version=0)
        task = asyncio.create_task(resume_and_time(engine, source.resume))
        await run_until_all_wait()
        assert sent.methods == [RPC, RESUME]
        sent.reply([7.0])
        sent.reply(None)
        assert await task == 7.0
