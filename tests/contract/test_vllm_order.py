"""The order in which calls reach vLLM's engine: a load right after its pause, a resume right after a read of the clock.

Our server and vLLM's own client determine it together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.hosts import found

from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.replica.server import REAL_TIME_PRIORITY, SeamlessServer
from seamless_verl.resources.ledger.activity import Activity
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


def server_of(sent: Sent, parallel: int) -> Any:
    engine = SimpleNamespace(
        engine_core=sent.client,
        vllm_config=SimpleNamespace(kv_transfer_config=None),
        collective_rpc=sent.client.collective_rpc_async,
        resume_generation=partial(found("vllm.v1.engine.async_llm:AsyncLLM", "engine-source").resume_generation, sent),
    )
    sent.engine_core = sent.client
    source = AsyncLLMSource(engine, version=0)  # type: ignore[arg-type]
    bucket = SimpleNamespace(update_weights_bucket_megabytes=1)
    return SimpleNamespace(
        engine=engine,
        activity=Activity("replica", ["device"]),
        config=SimpleNamespace(checkpoint_engine=bucket, data_parallel_size=parallel),
        pause=lambda mode: source.pause(PauseMode(mode)),
        _end_reading=partial(asyncio.sleep, 0),
        _resume=source.resume,
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
        with ExitStack() as standing, ExitStack() as noted:
            load = SeamlessServer._pause_and_load(server_of(sent, parallel), 1, standing, noted)
            task = asyncio.create_task(load)
            await run_until_all_wait()
            assert sent.methods == before_the_reply and not first, "its last step is as usual"
            sent.reply(None)
            await run_until_all_wait()
            assert first == [True]
            sent.reply([5.0])
            assert await task == 5.0 and sent.methods == [PAUSE, RPC] and first == [True]
        assert first == [True, False]

    monkeypatch.setattr(type(current_platform), REAL_TIME_PRIORITY, staticmethod(real_time_priority), raising=False)
    await asyncio.wait_for(case(), 30)


async def test_the_clock_is_read_right_before_the_resume() -> None:
    async with asyncio.timeout(30):
        sent = Sent()
        task = asyncio.create_task(SeamlessServer._resume_and_time(server_of(sent, 1)))
        await run_until_all_wait()
        assert sent.methods == [RPC, RESUME]
        sent.reply([7.0])
        sent.reply(None)
        assert await task == 7.0
