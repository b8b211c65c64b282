"""An agent that asks for a sum and, as long as the answer is wrong, asks again: three tries."""

from __future__ import annotations

import re
from typing import Any

from openai import AsyncOpenAI

NUMBER = re.compile(r"-?[0-9]+")
TRIES = 3
LATER = 0.5  # each further try is worth so much of the one before
REPLY_TOKENS = 32
AGAIN = "That is wrong. Try again."


async def run(task: dict[str, Any], endpoint: Any) -> float:
    """One session; its reward is 1 for a right first answer, less for later ones, 0 for none."""
    messages, truth = list(task["prompt"]), task["reward_model"]["ground_truth"]
    async with AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.session_key) as client:
        for tried in range(TRIES):
            response = await client.chat.completions.create(model="policy", messages=messages, max_tokens=REPLY_TOKENS)
            reply = response.choices[0].message.content or ""
            if NUMBER.findall(reply)[-1:] == [truth]:
                return LATER**tried
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": AGAIN}]
    return 0.0
