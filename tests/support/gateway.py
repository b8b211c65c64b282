"""The gateway harness: a gateway on a real port over scripted replies, with a recorder that can be delayed."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
from transformers import AutoTokenizer

from seamless_verl.gateway import server
from seamless_verl.gateway.calls import SessionCall
from seamless_verl.gateway.server import Gateway, GatewaySettings
from seamless_verl.gateway.sessions import Session
from seamless_verl.tiny.tokenizer import END_OF_TURN, token_id
from seamless_verl.trajectory.records import Finish, TokenChunk, TopLogprobs, logprobs, tokens

ADMIN_KEY = "the admin's"
OPTIONS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--served-model-name", "nano")
EOS = token_id(END_OF_TURN)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
TOOL_CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


@cache
def share_starts() -> None:
    """Let a process do once what every gateway would that it starts, and which is most of such a start.

    Each would look through the million objects that were imported, and make vLLM's parser of arguments.
    """
    gc.collect()
    gc.freeze()
    for name in ("freeze", "unfreeze"):
        setattr(gc, name, lambda: None)
    server.serve_parser = cache(server.serve_parser)  # type: ignore[assignment]


@cache
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@dataclass
class Reply:
    """Ids in chunks of `size`; with `hold` set, the stream waits for it after the first chunk."""

    ids: Sequence[int]
    finish: Finish = Finish.STOP
    size: int = 1
    hold: asyncio.Event | None = None
    error: Exception | None = None


@dataclass
class ScriptedSource:
    """A CallSource that gives the replies in order, and the last one again and again; nothing is sampled."""

    replies: list[Reply]
    calls: list[SessionCall] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(self, call: SessionCall) -> AsyncGenerator[TokenChunk, None]:
        self.calls.append(call)
        self.started.set()
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        given = 0
        try:
            for chunk in reply_chunks(reply, call.sampling):
                await asyncio.sleep(0)
                if given and reply.hold is not None:
                    await reply.hold.wait()
                if reply.error is not None and given:
                    raise reply.error
                given += len(chunk.ids)
                yield chunk
        finally:
            if given < len(reply.ids):
                self.aborted.append(call.call_id)


def reply_chunks(reply: Reply, sampling: Any) -> list[TokenChunk]:
    budget = sampling["max_tokens"]
    finish = reply.finish if len(reply.ids) <= budget else Finish.LENGTH
    ids = list(reply.ids)[:budget]
    parts = [ids[start : start + reply.size] for start in range(0, len(ids), reply.size)]
    top = sampling["logprobs"]
    return [
        TokenChunk(
            tokens(part),
            logprobs([-0.25] * len(part)),
            7,
            "replica-0",
            finish if number == len(parts) - 1 else None,
            top=tuple(likeliest(token, top) for token in part) if top else None,
        )
        for number, part in enumerate(parts)
    ]


def likeliest(token: int, number: int) -> TopLogprobs:
    """The letters from `a` on, and the sampled token last where it is none of them."""
    letters = tuple(range(97, 97 + number))
    ids = letters if token in letters else (*letters, token)
    return TopLogprobs(ids, (-0.25,) * len(ids), ids.index(token) + 1)


@dataclass
class MemoryRecorder:
    """A Recorder in memory; `gate`, while it is clear, delays every awaited chunk."""

    events: list[tuple[Any, ...]] = field(default_factory=list)
    gate: asyncio.Event | None = None

    async def open_session(self, session: Session) -> None:
        self.events.append(("opened", session.session_id))

    async def start_call(self, call: SessionCall) -> None:
        self.events.append(("started", call.call_id))

    def routes_needed_from(self, call: SessionCall) -> int | None:
        return None

    def buffer_chunk(self, call: SessionCall, chunk: TokenChunk) -> None:
        self.events.append(("chunk", call.call_id, list(chunk.ids)))

    async def record_chunk(self, call: SessionCall, chunk: TokenChunk) -> None:
        if self.gate is not None:
            await self.gate.wait()
        self.events.append(("chunk", call.call_id, list(chunk.ids)))

    async def end_call(self, call: SessionCall, finish: Finish, reply: dict[str, Any]) -> None:
        self.events.append(("ended", call.call_id, finish, reply))

    async def post_reward(self, session: Session, name: str, value: float) -> None:
        self.events.append(("rewarded", session.session_id, name, value))

    def find_turn(self, session: Session, reply_id: str) -> str | None:
        return None

    def note_refusal(self, session: Session, path: str, status: int, message: str) -> None:
        self.events.append(("refused", session.session_id, path, status, message))

    async def close_session(self, session: Session, reason: str) -> None:
        self.events.append(("closed", session.session_id, reason))

    def ids(self, call_id: str) -> list[int]:
        return [token for kind, *rest in self.events if kind == "chunk" and rest[0] == call_id for token in rest[1]]

    def ends(self) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == "ended"]


@dataclass
class GatewayHarness:
    """A running gateway with one session, and clients of each kind that know only its base URL."""

    gateway: Gateway
    source: ScriptedSource
    recorder: MemoryRecorder
    http: httpx.AsyncClient
    model: Path
    session: dict[str, str]
    openai: openai.AsyncOpenAI
    anthropic: anthropic.AsyncAnthropic

    @property
    def tokenizer(self) -> Any:
        return tokenizer(self.model)

    def set_replies(self, *texts: str, end: bool = True, **options: Any) -> None:
        """The next replies, each ended by the model unless `end` is False."""
        self.source.replies = [Reply(self.ids(text) + [EOS] * end, **options) for text in texts]

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, number: int = -1) -> str:
        """The text of a call's prompt ids."""
        return str(self.tokenizer.decode(self.source.calls[number].prompt_ids))

    async def admin(self, method: str, path: str, body: Any = None) -> httpx.Response:
        url, headers = f"{self.gateway.url}/admin/{path}", {"authorization": f"Bearer {ADMIN_KEY}"}
        return await self.http.request(method, url, json=body, headers=headers)

    async def open(self, **body: Any) -> dict[str, str]:
        reply = await self.admin("POST", "sessions", {"uid": "prompt-1", **body})
        assert reply.status_code == 200, reply.text
        opened: dict[str, str] = reply.json()
        return opened

    async def drain(self) -> None:
        """Waits until every call has ended and its end is on record."""
        await self.gateway.client.drain()


@asynccontextmanager
async def gateway_harness(
    nano: Path,
    more_options: Sequence[str] = (),
    *,
    limit_s: float | None = 300,
    recorder: Any = None,
    journal: Any = None,
    **options: Any,
) -> AsyncGenerator[GatewayHarness, None]:
    """A gateway for at most `limit_s` seconds; it ends in the task that it began in, but for one without a limit."""
    share_starts()
    source, recorder = ScriptedSource([Reply([104, 105, EOS])]), recorder or MemoryRecorder()
    settings = GatewaySettings(str(nano / "model"), ADMIN_KEY, (*OPTIONS, *more_options), **options)
    async with (
        asyncio.timeout(limit_s),
        Gateway(settings, source=source, recorder=recorder, journal=journal) as gateway,
        httpx.AsyncClient(timeout=30) as http,
    ):
        session = await gateway.admin.open({"uid": "prompt-1"})
        given = {"api_key": "unused", "max_retries": 0}
        async with (
            openai.AsyncOpenAI(base_url=session["base_url"], **given) as openai_client,
            anthropic.AsyncAnthropic(base_url=session["anthropic_base_url"], **given) as anthropic_client,
        ):
            harness = GatewayHarness(
                gateway, source, recorder, http, nano / "model", session, openai_client, anthropic_client
            )
            yield harness
            await harness.drain()
            gateway.table.check_integrity()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}
