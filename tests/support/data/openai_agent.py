"""An agent on the plain openai SDK: it asks, complains once, and is rewarded for digits."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

FORM = r"(0|1){40}\."


async def run(task: dict[str, Any], endpoint: Any) -> float:
    return await asked(task, endpoint, max_retries=0)


async def traced(task: dict[str, Any], endpoint: Any) -> float:
    """Names a span of its own with each call, in a trace that has the session's id."""
    trace = hashlib.sha256(endpoint.session_id.encode()).hexdigest()[:32]
    headers = {"traceparent": f"00-{trace}-{trace[:16]}-01"}
    return await asked(task, endpoint, between_s=0.05, max_retries=0, default_headers=headers)


async def retrying(task: dict[str, Any], endpoint: Any) -> float:
    """With the SDK's own two retries."""
    return await asked(task, endpoint)


async def uneven(task: dict[str, Any], endpoint: Any) -> float:
    """As `retrying`, but half of the questions are easy: whatever is said to them is at least half right."""
    share = await asked(task, endpoint)
    easy = sum(map(ord, task["prompt"][-1]["content"])) % 2 == 0
    return 0.5 + share / 2 if easy else share


async def held(task: dict[str, Any], endpoint: Any) -> float:
    """Begins when a file is gone: a test holds training back by it."""
    while is_held():  # noqa: ASYNC110 - nothing notifies of a file
        await asyncio.sleep(0.1)
    return await asked(task, endpoint, max_retries=0)


async def held_at_end(task: dict[str, Any], endpoint: Any) -> float:
    """As `retrying`, but it ends only when the file is gone."""
    reward = await asked(task, endpoint)
    while is_held():  # noqa: ASYNC110 - nothing notifies of a file
        await asyncio.sleep(0.1)
    return reward


def takes() -> bool:
    """Whether this is the one that takes the file."""
    try:
        Path(os.environ["STUCK_IF_TAKEN"]).unlink()
    except FileNotFoundError:
        return False
    return True


def is_held() -> bool:
    return Path(os.environ["HELD_WHILE_EXISTS"]).exists()


async def slow(task: dict[str, Any], endpoint: Any) -> float:
    """Takes up to two seconds, so that at any moment some sessions of a group have ended, others not, or not begun."""
    await asyncio.sleep(random.random())
    return await asked(task, endpoint, between_s=random.random(), max_retries=0)


async def stuck(task: dict[str, Any], endpoint: Any) -> float:
    """Waits for something that does not come."""
    await asyncio.Event().wait()
    return 0.0


async def one_stuck(task: dict[str, Any], endpoint: Any) -> float:
    """As `held`; but the one that takes the file `STUCK_IF_TAKEN` does not end."""
    while is_held():  # noqa: ASYNC110 - nothing notifies of a file
        await asyncio.sleep(0.1)
    return await (stuck(task, endpoint) if takes() else asked(task, endpoint, max_retries=0))


async def stuck_after_a_call(task: dict[str, Any], endpoint: Any) -> float:
    await asked(task, endpoint, max_retries=0)
    return await stuck(task, endpoint)


async def fails(task: dict[str, Any], endpoint: Any) -> float:
    raise RuntimeError("it was to be run by nobody")


async def strict(task: dict[str, Any], endpoint: Any) -> float:
    """Asks for two replies in a form that a token too many or too few would break."""
    async with AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.session_key, max_retries=0) as client:
        said = [await of_form(client, list(task["prompt"])) for _ in range(2)]
    return sum(text.count("1") for text in said) / sum(map(len, said))


async def of_form(client: AsyncOpenAI, messages: list[Any]) -> str:
    form = {"structured_outputs": {"regex": FORM}}
    reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=100, extra_body=form)
    text = reply.choices[0].message.content or ""
    assert re.fullmatch(FORM, text), f"{text!r} is not of the form"
    return text


async def varied(task: dict[str, Any], endpoint: Any) -> float:
    """The first replies of sessions have different lengths, so that some run when the others of a step have ended."""
    length = 4 + int(hashlib.sha256(endpoint.session_id.encode()).hexdigest(), 16) % 90
    return await asked(task, endpoint, first_tokens=length, max_retries=0)


async def asked(
    task: dict[str, Any], endpoint: Any, *, between_s: float = 0.0, first_tokens: int = 6, **options: Any
) -> float:
    client = AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.session_key, **options)
    messages: list[Any] = list(task["prompt"])
    said = ""
    async with client:
        for complaint in ("Sure?", None):
            await asyncio.sleep(0.0 if complaint else between_s)
            reply = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=first_tokens if complaint else 6
            )
            said += reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": reply.choices[0].message.content or ""}]
            messages += [{"role": "user", "content": complaint}] if complaint else []
    return sum(character.isdigit() for character in said) / max(1, len(said))


async def branching(task: dict[str, Any], endpoint: Any) -> None:
    """Asks two questions that share no more than their beginning, so that it has two training sequences; one session
    in five or so raises after its first answer. It leaves its reward to the reward function."""
    async with AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.session_key, max_retries=0) as client:
        for question in (list(task["prompt"]), [{"role": "user", "content": "2+2="}]):
            reply = await client.chat.completions.create(model="policy", messages=question, max_tokens=6)
            if sum(map(ord, endpoint.session_id)) % 5 == 0:
                raise ConnectionError(f"the tool of {reply.id} took too long to connect")


async def credited(task: dict[str, Any], endpoint: Any) -> float:
    """As `run`, but each of its two calls is rewarded for its own digits, and the session is not."""
    messages: list[Any] = list(task["prompt"])
    async with AsyncOpenAI(base_url=f"{endpoint.base_url}/v1", api_key=endpoint.session_key, max_retries=0) as client:
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
            said = reply.choices[0].message.content or ""
            digits = sum(character.isdigit() for character in said) / max(1, len(said))
            await client.post("/session/reward", cast_to=object, body={"reward": digits, "call": reply.id})
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
    return 0.0
