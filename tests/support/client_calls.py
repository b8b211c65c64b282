"""Calls of verl's own agent loops, of each kind, through the client that they are given."""

from __future__ import annotations

import asyncio
from typing import Any

from omegaconf import DictConfig

from seamless_verl.agent_loops.llm_client import SeamlessClient

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # sampling parameters, and what is beside the prompt
    "text": ({}, {}),
    "stop strings": ({"stop": ["never"]}, {}),
    "extra arguments": ({"extra_args": {"of": "mine"}}, {}),
    "images": ({}, {"image_data": [b"pixels"], "mm_processor_kwargs": {"size": 2}, "priority": 7}),
}


def generate(config: DictConfig, calls: int) -> list[int]:
    """So many calls of each kind at once; returns how many tokens each got."""

    async def run() -> list[int]:
        client = SeamlessClient(config)
        running = [
            client.generate(
                f"{kind} {i}", prompt_ids=[i % 100, 2, 3], sampling_params={"max_tokens": 1000, **sampling}, **beside
            )
            for kind, (sampling, beside) in KINDS.items()
            for i in range(calls)
        ]
        return [len(output.token_ids) for output in await asyncio.gather(*running)]

    return asyncio.run(run())
