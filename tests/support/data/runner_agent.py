"""An agent for runners: two calls of the model, over HTTP and nothing else."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx


async def run(task: dict[str, Any], endpoint: Any) -> float:
    messages = list(task["prompt"])
    async with httpx.AsyncClient(timeout=120, verify=False) as http:
        for _ in range(2):
            body = {"model": "policy", "messages": messages, "max_tokens": 8}
            reply = await http.post(f"{endpoint.base_url}/v1/chat/completions", json=body)
            reply.raise_for_status()
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
            await asyncio.sleep(task.get("pause_s", 0.0))
    if "number" in task:
        return float(task["number"] % 2)
    said = "".join(message["content"] or "" for message in messages if message["role"] == "assistant")
    return sum(character.isdigit() for character in said) / max(1, len(said))


async def patient(task: dict[str, Any], endpoint: Any) -> float:
    """The same, but it asks again, however long the run is away."""
    messages = list(task["prompt"])
    async with httpx.AsyncClient(timeout=120, verify=False) as http:
        for _ in range(2):
            await asyncio.sleep(2 * random.random())
            body = {"model": "policy", "messages": messages, "max_tokens": 8}
            reply = await asked_again(http, f"{endpoint.base_url}/v1/chat/completions", body)
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
    said = "".join(message["content"] or "" for message in messages if message["role"] == "assistant")
    return sum(character.isdigit() for character in said) / max(1, len(said))


async def asked_again(http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> httpx.Response:
    while True:
        try:
            reply = await http.post(url, json=body)
        except httpx.TransportError:
            await asyncio.sleep(0.5)
            continue
        if reply.status_code not in (429, 502, 503, 504):
            return reply.raise_for_status()
        await asyncio.sleep(0.5)
