"""Requests that run on a real engine in the background of a test."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.engine import EngineRequest
from seamless_verl.trajectory.records import Finish, TokenChunk

PROMPTS = [[1, 2, 3, 4, 5], [10, 20, 30], [7] * 40, [100, 90, 80, 70]]


class RunningRequest:
    """One request that runs in a task of its own; `chunks` grows meanwhile."""

    def __init__(
        self,
        source: AsyncLLMSource,
        name: str,
        prompt: list[int],
        tokens: int,
        conversation: str = "",
        priority: int = 0,
        media: bytes = b"",
        routes_from: int | None = None,
        **extra: Any,
    ) -> None:
        self.prompt, self.chunks, self.grew = prompt, list[TokenChunk](), asyncio.Condition()
        fields = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True, "seed": len(name), **extra}
        beside = {"conversation": conversation, "priority": priority, "media": media, "routes_from": routes_from}
        request = EngineRequest(name, array("i", prompt), fields, **beside)
        self.task = asyncio.create_task(self.run(source, request))

    async def run(self, source: AsyncLLMSource, request: EngineRequest) -> None:
        async for chunk in source.generate(request):
            async with self.grew:
                self.chunks.append(chunk)
                self.grew.notify_all()

    async def produced(self, tokens: int) -> None:
        async with self.grew:
            await self.grew.wait_for(lambda: sum(len(chunk.ids) for chunk in self.chunks) >= tokens)

    @property
    def finish(self) -> Finish | None:
        return self.chunks[-1].finish_reason

    def column(self, name: str) -> list[Any]:
        per_token = {
            "ids": lambda d: d.ids,
            "logprobs": lambda d: d.logprobs,
            "version": lambda d: [d.version] * len(d.ids),
        }
        return [value for chunk in self.chunks for value in per_token[name](chunk)]
