"""A calculator agent as anyone would write it on the openai SDK; nothing in it depends on training.

OPENAI_BASE_URL=http://... OPENAI_API_KEY=... python recipes/openai_tool_agent/agent.py "What is 37+41-12?"
"""

from __future__ import annotations

import asyncio
import json
import operator
import re
import sys
from typing import Any

from openai import AsyncOpenAI

TURNS = 4  # two calls are enough for any question; one more may fail, and then the model has to answer
REPLY_TOKENS = 80  # a call has 62
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "One sum or difference.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
OPERATION = re.compile(r"\s*([0-9]{1,9})\s*([-+*])\s*([0-9]{1,9})\s*")
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def calculator(expression: str) -> str:
    """The value of one operation on two whole numbers, or `error`; nothing is evaluated."""
    found = OPERATION.fullmatch(expression)
    return str(OPERATORS[found[2]](int(found[1]), int(found[3]))) if found else "error"


def call_tool(name: str, arguments: str) -> str:
    """The result of a tool call. The model may ask for anything: what cannot be done is an `error`."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):  # a model may open more brackets than the parser can nest
        return "error"
    expression = parsed.get("expression") if isinstance(parsed, dict) else None
    return calculator(expression) if name == "calculator" and isinstance(expression, str) else "error"


async def solve(client: AsyncOpenAI, messages: list[Any], model: str = "policy") -> str:
    """Call the model until it answers without a tool, for at most `TURNS` replies; returns the last one's text."""
    for _ in range(TURNS):
        response = await client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, tool_choice="auto", max_tokens=REPLY_TOKENS
        )
        reply = response.choices[0].message
        if not reply.tool_calls:
            break
        messages = [*messages, reply.model_dump(exclude_none=True)]
        for call in reply.tool_calls:
            result = call_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return reply.content or ""


async def run(task: dict[str, Any], endpoint: Any) -> None:
    """One session. It returns no reward, so reward.py gives it."""
    async with AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.session_key) as client:
        await solve(client, task["prompt"])


async def main(question: str) -> None:
    async with AsyncOpenAI() as client:
        sys.stdout.write(await solve(client, [{"role": "user", "content": question}]) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
