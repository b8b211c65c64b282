"""When an engine's process is killed its replica is reported as lost, so that calls continue elsewhere."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from support.engine_requests import PROMPTS, RunningRequest
from support.vllm_engine import processes, started

from seamless_verl.errors import ReplicaLostError
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.engine import PauseMode

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),  # vLLM's client leaves it to the collector
]
USABLE = sorted(os.sched_getaffinity(0))


def test_calls_and_commands_of_an_engine_that_was_killed_are_lost(nano: Path) -> None:
    with started(nano / "model", cores=USABLE, devices=[len(USABLE) - 1]) as engine:

        async def scenario() -> None:
            source = AsyncLLMSource(engine.llm, version=0)
            calls = [RunningRequest(source, f"running-{i}", prompt, 900) for i, prompt in enumerate(PROMPTS)]
            await asyncio.gather(*(call.produced(10) for call in calls))
            (core,) = processes("EngineCore")
            core.kill()
            ends = await asyncio.wait_for(asyncio.gather(*(c.task for c in calls), return_exceptions=True), 30)
            assert [type(end) for end in ends] == [ReplicaLostError] * len(calls), (
                "a call that failed does not continue elsewhere"
            )
            assert all(len(call.column("ids")) >= 10 and call.finish is None for call in calls)
            assert source.in_flight == {}
            for refused in (
                RunningRequest(source, "late", [1, 2], 5).task,
                source.pause(PauseMode.KEEP),
                source.resume(),
            ):
                with pytest.raises(ReplicaLostError):
                    await asyncio.wait_for(refused, 30)

        engine.run(scenario())
