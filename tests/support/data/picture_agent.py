"""An agent that shows a model the same picture in both of its turns."""

from __future__ import annotations

import io
from base64 import b64encode
from typing import Any

from openai import AsyncOpenAI
from PIL import Image


def picture() -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (56, 28), "red").save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"}}


async def run(task: dict[str, Any], endpoint: Any) -> float:
    said, messages = "", list[Any]()
    async with AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.session_key, max_retries=0) as client:
        for text in (task["prompt"][-1]["content"], "Sure?"):
            messages.append({"role": "user", "content": [{"type": "text", "text": text}, picture()]})
            reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
            said += reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    return sum(ord(character) < 64 for character in said) / max(1, len(said))
