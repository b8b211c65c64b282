"""An agent on the plain openai SDK: it asks, complains once, and is rewarded for digits."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI


async def run(task: dict[str, Any], endpoint: Any) -> float:
    return await asked(task, endpoint, max_retries=0)


async def retrying(task: dict[str, Any], endpoint: Any) -> float:
    """With the SDK's own two retries."""
    return await asked(task, endpoint)


async def stuck(task: dict[str, Any], endpoint: Any) -> float:
    """Waits for something that does not come."""
    await asyncio.Event().wait()
    return 0.0


async def asked(task: dict[str, Any], endpoint: Any, **options: Any) -> float:
    client = AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.session_key, **options)
    messages: list[Any] = list(task["prompt"])
    said = ""
    async with client:
        for complaint in ("Sure?", None):
            reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
            said += reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": reply.choices[0].message.content or ""}]
            messages += [{"role": "user", "content": complaint}] if complaint else []
    return sum(character.isdigit() for character in said) / max(1, len(said))
