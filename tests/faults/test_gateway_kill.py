"""Kill -9 of the gateway under load, again and again: its agents' calls take longer, and that is all they see.

A child process runs a gateway over stub replicas and a journal. The parent's agents hold conversations with it, some
through an SDK, some reading streams and keeping every token they were shown; what fails they send again, as SDKs do.
A stub's next token is a function of all before it, so that one repeated or sampled anew anywhere shows; what was
shown is looked for in the journal before another gateway could make it again.
Each gateway is forked from a process with its imports, so that it starts at once. SEAMLESS_KILLS sets the least number.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.forkserver import forkserver_with, launching
from support.gateway_restart import ADMIN, decode, expected_ids, generated_ids, open_session
from support.paths import child_environment

from seamless_verl.journal import JournalReader, SqliteJournal, Stage
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.trajectory.records import Finish

pytestmark = [pytest.mark.integration, pytest.mark.slowest(6)]
KILLS = int(os.environ.get("SEAMLESS_KILLS", "5"))
STREAMING, ASKING, LENGTH, DELAY = 3, 3, 50, 0.02  # agents of each kind; tokens of a call, and seconds between them
LONGEST = 1.5  # seconds from a start to the kill; a call takes LENGTH * DELAY
TURNS = 20  # of a conversation, which ends before it is longer than the model takes; the next begins anew
PATIENCE = 120  # attempts, with PAUSE seconds between them
PAUSE = 0.25
MODULE = "support.gateway_restart"
KILLED = 128 + signal.SIGKILL  # as a launcher says it of what was forked for it


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Of gateways that are forks of one process."""
    for name, value in child_environment().items():
        monkeypatch.setenv(name, value)
    with forkserver_with(MODULE, tmp_path, import_s=240) as environ:
        yield environ


@dataclass
class Agent:
    """A conversation; `shown` are the ids of each turn as far as a stream gave them, `said` the replies' texts.

    `cut` counts the streams that broke after they had shown something.
    """

    base_url: str
    session_id: str
    over: asyncio.Event
    shown: list[list[int]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    cut: int = 0

    async def run(self, streaming: bool) -> None:
        messages: list[dict[str, str]] = []
        client = openai.AsyncOpenAI(base_url=self.base_url, api_key="unused", max_retries=PATIENCE)
        async with client, httpx.AsyncClient(timeout=30) as http:
            while not self.over.is_set():
                messages = messages if len(self.said) % TURNS else []
                messages.append({"role": "user", "content": f"turn {len(self.said)} of {self.session_id}"})
                body = {"model": "nano", "messages": messages, "max_tokens": LENGTH}
                text = await (self.streamed(http, body) if streaming else self.asked(client, body))
                self.said.append(text)
                messages.append({"role": "assistant", "content": text})

    async def asked(self, client: openai.AsyncOpenAI, body: dict[str, Any]) -> str:
        reply: Any = await client.chat.completions.create(**body)
        return str(reply.choices[0].message.content)

    async def streamed(self, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        """Every attempt shows the call from its beginning, and must agree with all that was shown before."""
        self.shown.append([])
        body = {**body, "stream": True, "return_token_ids": True}
        for attempt in range(PATIENCE):
            ids: list[int] = []
            headers = {"x-stainless-retry-count": str(attempt)}
            try:
                async with http.stream(
                    "POST", f"{self.base_url}/chat/completions", json=body, headers=headers
                ) as reply:
                    text = await self.read(reply, ids)
                assert ids == self.shown[-1]
                return text
            except httpx.TransportError:
                self.cut += bool(ids)
                await asyncio.sleep(PAUSE)
        raise TimeoutError(f"{self.session_id}: no gateway came back")

    async def read(self, reply: httpx.Response, ids: list[int]) -> str:
        assert reply.status_code == 200, await reply.aread()
        text, ended = "", False
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    ids.extend(choice.get("token_ids") or [])
                common = min(len(ids), len(self.shown[-1]))
                assert ids[:common] == self.shown[-1][:common], "a token that was shown has changed"
                self.shown[-1] = max(self.shown[-1], list(ids), key=len)
            ended |= line == "data: [DONE]"
        if not ended:
            raise httpx.RemoteProtocolError("the stream stopped without an end")
        return text


@dataclass
class Keeper:
    """Starts the gateway, and kills it."""

    environ: dict[str, str]
    arguments: list[str]
    process: asyncio.subprocess.Process | None = None
    pid: int = 0

    async def start(self) -> None:
        command = launching("-c", f"from {MODULE} import main; main()", *self.arguments)
        self.process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=self.environ)
        self.pid = int(await self.line())

    async def line(self) -> str:
        assert self.process is not None and self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        assert line, "the gateway ended before it listened"
        return line.strip()

    async def listening(self) -> str:
        while not (line := await self.line()).startswith("http://"):
            pass  # what libraries print
        return line

    async def kill(self) -> None:
        assert self.process is not None
        os.kill(self.pid, signal.SIGKILL)
        assert await self.process.wait() == KILLED, "the gateway ended by itself"


@asynccontextmanager
async def kept(environ: dict[str, str], model: Path, journal: Path) -> AsyncGenerator[Keeper, None]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keeper = Keeper(environ, [str(model), str(journal), str(port), str(DELAY)])
    await keeper.start()
    try:
        yield keeper
    finally:
        if keeper.process is not None and keeper.process.returncode is None:
            await keeper.kill()


async def killed_again_and_again(
    keeper: Keeper, rng: random.Random, reader: JournalReader, agents: list[Agent]
) -> None:
    for round_ in range(4 * KILLS):
        if round_ >= KILLS and sum(agent.cut for agent in agents) >= KILLS:
            break  # a kill before a stream has shown anything cuts none
        await asyncio.sleep(rng.random() * LONGEST)
        await keeper.kill()
        await asyncio.sleep(PAUSE)  # what had left the gateway arrives
        for agent in agents:
            check_shown(reader, agent)
        await keeper.start()
        if round_ % 2 == 1:  # and while it starts
            await asyncio.sleep(rng.random() * LONGEST)
            await keeper.kill()
            await keeper.start()
        await keeper.listening()
    await asyncio.sleep(LONGEST)


def check_shown(reader: JournalReader, agent: Agent) -> None:
    """While no gateway runs: whatever was shown is on record."""
    record = reader.read(agent.session_id)
    assert record is not None
    for call, ids in zip(record.calls, agent.shown, strict=False):
        assert generated_ids(call)[: len(ids)] == ids, "a token was shown that is not on record"
    assert len(record.calls) >= len([ids for ids in agent.shown if ids])


def check(journal: SqliteJournal, agent: Agent) -> int:
    """Everything shown is on record, once, and is what it would have been; the number of tokens."""
    record = journal.read(agent.session_id)
    assert record is not None and record.stage is Stage.CLOSED
    assert [call.finish for call in record.calls] == [Finish.LENGTH] * len(agent.said), "a call was lost or made anew"
    before: list[int] = []
    for turn, call in enumerate(record.calls):
        ids, before = generated_ids(call), before if turn % TURNS else []
        assert ids == expected_ids(call, LENGTH)
        assert agent.said[turn] == decode(ids) == call.reply["message"]["content"]
        assert not agent.shown or agent.shown[turn] == ids
        assert call.prompt_ids.tolist()[: len(before)] == before, "a turn was not built on the one before it"
        before = [*call.prompt_ids, *ids]
    rebuilt = rebuild_record(record)
    rebuilt.check_integrity()
    assert rebuilt.tree.generated == LENGTH * len(agent.said) == sum(map(len, map(generated_ids, record.calls)))
    return rebuilt.tree.generated


async def rounds(environ: dict[str, str], model: Path, path: Path, rng: random.Random) -> list[Agent]:
    over = asyncio.Event()
    async with kept(environ, model, path) as keeper, httpx.AsyncClient(timeout=30) as http:
        url = await keeper.listening()
        sessions = [await open_session(http, url) for _ in range(STREAMING + ASKING)]
        agents = [Agent(f"{url}/s/{one['key']}/v1", one["session_id"], over) for one in sessions]
        running = [asyncio.create_task(one.run(n < STREAMING)) for n, one in enumerate(agents)]
        await killed_again_and_again(keeper, rng, JournalReader(path), agents)
        over.set()
        await asyncio.gather(*running)
        for one in agents:
            closing = await http.post(f"{url}/admin/sessions/{one.session_id}/close", json={}, headers=ADMIN)
            view = closing.json()
            assert (view["turns"], view["tokens"]) == (len(one.said), LENGTH * len(one.said))
    return agents


@pytest.mark.timeout(3600)
def test_killed_at_any_instant_its_agents_only_wait(environ: dict[str, str], nano: Path, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    path = tmp_path / "journal.sqlite"
    going = rounds(environ, nano / "model", path, random.Random(seed))
    agents = asyncio.run(asyncio.wait_for(going, 60 + 90 * KILLS))
    with SqliteJournal(path) as journal:
        journal.check_integrity()
        tokens = sum(check(journal, agent) for agent in agents)
        stages = {one.session_id: one.stage for one in journal.sessions()}
        assert stages == dict.fromkeys((agent.session_id for agent in agents), Stage.CLOSED)
    cut = sum(agent.cut for agent in agents)
    assert cut >= KILLS, f"{cut} streams were cut, of {tokens} tokens: the load was too light to mean anything"
    print(f"at least {KILLS} rounds of kills: {tokens} tokens of {len(agents)} sessions, {cut} streams cut")  # noqa: T201
