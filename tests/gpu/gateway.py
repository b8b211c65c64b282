"""The gateway under load: agents on the OpenAI SDK, each with a session of several turns, over one real engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import openai

from gpu.engine import engine_of
from gpu.place import Place
from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.server import Gateway, GatewaySettings
from seamless_verl.journal import JournalReader, SqliteJournal
from seamless_verl.replica.engine_source import AsyncLLMSource
from seamless_verl.rollout.call import Calls
from seamless_verl.rollout.fleet import Fleet
from seamless_verl.transport import RemoteEngine, serve_engine

TURNS, REPLY = 3, 64
TOKEN, KEY = "between gateway and replica", "the admin's"


@asynccontextmanager
async def gateway_over(place: Place, llm: Any, journal: Path, seats: int) -> AsyncIterator[Gateway]:
    """The product's way to the engine: calls, fleet, TCP, the replica's source; a journal as the record."""
    source, fleet = AsyncLLMSource(llm, version=0), Fleet()
    fleet.commit(0)
    server = await serve_engine(source, "127.0.0.1", 0, token=TOKEN, replica_id="a")
    remote = await RemoteEngine.connect("127.0.0.1", server.port, token=TOKEN, replica_id="a")
    fleet.add("a", engine=remote, control=source, capacity=seats, version=0)
    options = ("--served-model-name", "policy", "--max-model-len", "2048")
    settings, calls = GatewaySettings(str(place.model), KEY, options, max_running=seats), Calls(fleet)
    with SqliteJournal(journal) as kept:
        async with Gateway(settings, source=calls, recorder=JournalRecorder(kept)) as gateway:
            yield gateway
            await gateway.client.drain()
        calls.check_integrity()
        await fleet.remove("a")
        await server.close()


async def agent(gateway: Gateway, number: int, firsts: list[float]) -> int:
    """One session of TURNS turns, each on top of the last; its generated tokens."""
    session = await gateway.admin.open({"uid": f"agent-{number}"})
    client = openai.AsyncOpenAI(base_url=session["base_url"], api_key="unused", max_retries=0, timeout=120)
    messages: list[Any] = [{"role": "user", "content": f"{number} and {number + 1}?"}]
    tokens = 0
    async with client:
        for _ in range(TURNS):
            began, reply = time.perf_counter(), ""
            stream = await client.chat.completions.create(
                model="policy",
                messages=messages,
                max_tokens=REPLY,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            first = None
            async for event in stream:
                if event.choices and event.choices[0].delta.content is not None:
                    first = first or time.perf_counter() - began
                    reply += event.choices[0].delta.content
                if event.usage is not None:
                    tokens += event.usage.completion_tokens
            firsts.append(first or time.perf_counter() - began)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "and then?"}]
    return tokens


async def load(place: Place, llm: Any, agents: int) -> dict[str, Any]:
    journal, firsts = place.folder / "trajectories.sqlite", list[float]()
    async with gateway_over(place, llm, journal, agents) as gateway:
        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(agent(gateway, number, firsts) for number in range(agents))))
        seconds = time.perf_counter() - began
    sessions = list(JournalReader(journal).sessions())
    assert tokens == agents * TURNS * REPLY, f"{tokens} tokens"
    assert len(sessions) == agents and {session.calls for session in sessions} == {TURNS}
    late = quantiles(firsts, n=20)[-1]
    return {"tokens_per_s": tokens / seconds, "first_token_s": median(firsts), "first_token_s_95": late}


def check(place: Place) -> None:
    agents = 64 if place.cuda else 8
    with engine_of(place) as engine:
        place.report("load", agents=agents, **engine.run(load(place, engine.llm, agents)))
