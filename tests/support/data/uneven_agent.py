"""An agent whose reply is long for one prompt in three, and short for the others."""

from __future__ import annotations

import json
import os
from typing import Any

from openai import AsyncOpenAI

SHORT, LONG = 4, 150  # tokens


async def run(task: dict[str, Any], endpoint: Any) -> float:
    """Writes to the file of RECORD which prompt its session is for, before it asks."""
    index = int(task["extra_info"]["index"])
    descriptor = os.open(os.environ["RECORD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, json.dumps([endpoint.session_id, index]).encode() + b"\n")
    os.close(descriptor)
    length = int(os.environ.get("LONG_REPLY", LONG)) if index % 3 == 2 else SHORT
    async with AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.session_key, max_retries=0) as client:
        reply = await client.chat.completions.create(
            model="policy", messages=list(task["prompt"]), max_tokens=length, extra_body={"ignore_eos": True}
        )
    said = reply.choices[0].message.content or ""
    return sum(character.isdigit() for character in said) / max(1, len(said))
