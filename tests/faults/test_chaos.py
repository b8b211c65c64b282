"""Many agents at once over real engines that are frozen, parted with, refitted and killed at random.

SEAMLESS_SESSIONS, SEAMLESS_TURNS and SEAMLESS_KILLED_REPLICAS make it longer than the test command does.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import psutil
import pytest
import ray
import torch
from support.local_plane import LocalDataPlane
from support.paths import child_environment
from support.version_weights import Weights

from seamless_verl.data_plane.settings import PlaneSettings
from seamless_verl.gateway.recorder import JournalRecorder
from seamless_verl.gateway.server import Gateway, GatewaySettings
from seamless_verl.journal import JournalReader, SqliteJournal
from seamless_verl.rollout.observation import CacheUse
from seamless_verl.rollout.replica import ReplicaState
from seamless_verl.trajectory.account import Account
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Turn
from seamless_verl.trajectory.sequences import assemble

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
    pytest.mark.long,
    pytest.mark.serial,
]
SESSIONS = int(os.environ.get("SEAMLESS_SESSIONS", "24"))
TURNS = int(os.environ.get("SEAMLESS_TURNS", "5"))
KILLED = int(os.environ.get("SEAMLESS_KILLED_REPLICAS", "1"))
UPDATES = 4  # at least, on a machine where sessions are faster than a replica's restart, too
NAMES = ("replica-0", "replica-1")
TOKEN, ADMIN = "the replicas'", {"authorization": "Bearer the admin's"}
START_S = 240.0


@dataclass
class Replica:
    """A replica's process, and the control that the rollout manager has of it: `pause.remote(mode)` as of an actor."""

    name: str
    process: asyncio.subprocess.Process
    port: int = 0
    asked: int = 0
    answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    reading: asyncio.Task[None] | None = None
    dead: bool = False

    @classmethod
    async def start(cls, model: Path, name: str, core: int) -> Replica:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "support.chaos_replica", str(model), name, str(core), TOKEN),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | child_environment() | {"VLLM_LOGGING_STREAM": "ext://sys.stderr"},
        )
        replica = cls(name, process)
        assert process.stdout is not None
        kind, replica.port = json.loads(await asyncio.wait_for(process.stdout.readline(), START_S))
        assert kind == "port"
        replica.reading = asyncio.create_task(replica.read())
        return replica

    async def read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            number, value = json.loads(line)
            if not (answer := self.answers.pop(number)).done():  # nobody waits for it any more
                answer.set_result(value)
        self.dead = True
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(ray.exceptions.RayActorError())

    async def ask(self, command: str, given: Any = None) -> Any:
        """As of an actor: raises RayActorError when it is dead."""
        if self.dead:
            raise ray.exceptions.RayActorError
        assert self.process.stdin is not None
        self.asked += 1
        answer = self.answers[self.asked] = asyncio.get_running_loop().create_future()
        self.process.stdin.write(json.dumps([self.asked, command, given]).encode() + b"\n")
        with suppress(ConnectionError):  # its death is heard of at the other end
            await self.process.stdin.drain()
        return await answer

    @property
    def pause(self) -> Remote:
        return Remote(self, "pause")

    @property
    def status(self) -> Remote:
        return Remote(self, "status")

    @property
    def cache_use(self) -> SimpleNamespace:
        return SimpleNamespace(remote=self.used)

    async def used(self) -> CacheUse:
        """As of an engine that counts nothing."""
        await self.ask("status")
        return CacheUse()

    @property
    def resume(self) -> Remote:
        return Remote(self, "resume")

    async def kill(self) -> None:
        """The engine's own processes with it: what a machine's death is."""
        with suppress(psutil.NoSuchProcess):  # it was killed, and nothing took its place
            itself = psutil.Process(self.process.pid)
            for one in (*itself.children(recursive=True), itself):
                one.kill()
        await self.process.wait()
        assert self.reading is not None
        await self.reading


@dataclass
class Remote:
    """A method of an actor."""

    replica: Replica
    command: str

    def remote(self, *given: Any) -> Any:
        return self.replica.ask(self.command, *given)


@dataclass
class Chaos:
    """Does to the replicas what a trainer and bad luck do; weights are loaded before a version is served."""

    plane: LocalDataPlane
    model: Path
    replicas: dict[str, Replica]
    choose: random.Random
    version: int = 0
    events: Counter[str] = field(default_factory=Counter)
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def attach(self, name: str) -> None:
        replica = self.replicas[name]
        await self.plane.attach(name, "127.0.0.1", replica.port, replica)

    async def load(self, names: Sequence[str]) -> None:
        """One at a time: another that wants the same finds it done, or dead."""
        async with self.updating:
            for name in await self.plane.execute("begin_sync", names):
                try:
                    await self.replicas[name].ask("load", self.version)
                except ray.exceptions.RayActorError:  # it died under the load
                    continue
                await self.plane.execute("end_sync", [name], self.version)

    async def update(self) -> None:
        """A rolling update."""
        async with self.updating:
            self.version += 1
            await self.plane.execute("commit", self.version)
        for name in self.choose.sample(NAMES, len(NAMES)):
            await self.load([name])

    async def pause(self) -> None:
        names = self.choose.sample(NAMES, self.choose.randint(1, 2))
        await self.plane.execute("pause", names)
        await asyncio.sleep(self.choose.uniform(0, 0.1))  # as long as a computation may take
        await self.plane.execute("resume", names)

    async def release(self) -> None:
        names = self.choose.sample(NAMES, self.choose.randint(1, 2))
        await self.plane.execute("release_memory", names)
        await asyncio.sleep(self.choose.uniform(0, 0.1))
        await self.plane.execute("reclaim_memory", names)
        await self.load(names)

    async def die(self) -> None:
        name = self.choose.choice(NAMES)
        await self.replicas[name].kill()
        while self.states()[name] is not ReplicaState.DEAD:  # noqa: ASYNC110 - the end of its connection is on its way
            await asyncio.sleep(0.01)
        self.replicas[name] = await Replica.start(self.model, name, core_of(name))
        await self.attach(name)
        self.events["die"] += 1
        await self.load([name])

    async def until(self, over: asyncio.Event) -> None:
        """Events one after the other, while replicas die and come back; the books are looked at after each."""
        deaths, dying = KILLED, asyncio.create_task(self.die())
        while not over.is_set() or deaths:
            if dying.done() and deaths:
                dying.result()
                deaths -= 1
                dying = asyncio.create_task(self.die()) if deaths else dying
            event = self.choose.choices([self.update, self.pause, self.release], [2, 4, 3])[0]
            await event()
            self.events[event.__name__] += 1
            self.plane.check_integrity()
            await asyncio.sleep(self.choose.uniform(0, 0.2))

    def states(self) -> dict[str, ReplicaState]:
        return {view.replica_id: view.state for view in self.plane.fleet.view}


def core_of(name: str) -> int:
    cores = sorted(os.sched_getaffinity(0))
    return cores[NAMES.index(name) % len(cores)]


@asynccontextmanager
async def gateway_over_replicas(
    model: Path, journal: SqliteJournal
) -> AsyncIterator[tuple[Chaos, Gateway, JournalRecorder]]:
    plane, recorder = LocalDataPlane(PlaneSettings("chaos", TOKEN, 128)), JournalRecorder(journal)
    await plane.start()
    started = await asyncio.gather(*(Replica.start(model, name, core_of(name)) for name in NAMES))
    chaos = Chaos(plane, model, dict(zip(NAMES, started, strict=True)), random.Random(4))
    try:
        for name in NAMES:
            await chaos.attach(name)
        await chaos.load(NAMES)
        settings = GatewaySettings(str(model), "the admin's", ("--served-model-name", "nano", "--max-model-len=1024"))
        async with Gateway(settings, source=plane.calls, recorder=recorder) as gateway:
            yield chaos, gateway, recorder
        await plane.stop()
    finally:
        await asyncio.gather(*(replica.kill() for replica in chaos.replicas.values()))


async def agent(gateway: Gateway, number: int) -> tuple[str, int]:
    """One session to its end; its id, and how many tokens the agent was told it used."""
    opened = await gateway.admin.open({"uid": f"prompt-{number}"})
    client = openai.AsyncOpenAI(base_url=opened["base_url"], api_key=opened["key"], max_retries=0, timeout=600)
    messages: list[dict[str, str]] = []
    used = 0
    async with client:
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"{number}.{turn}"})
            reply: Any = await client.chat.completions.create(
                model="nano", messages=messages, max_tokens=8 + (number + turn) % 17, temperature=1.0
            )
            used += reply.usage.completion_tokens
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
    await gateway.admin.close(opened["session_id"], "finished")
    return opened["session_id"], used


def largest_error(turns: Sequence[Turn], weights: Weights) -> float:
    """Of every generated token against transformers under the weights of its version."""
    worst, models = 0.0, dict[int, Any]()
    for turn in turns:
        ids, begin = turn.prompt_ids + turn.generated_ids, len(turn.prompt_ids)
        for segment in turn.segments:
            model = models.setdefault(segment.version, weights.model(segment.version))
            with torch.no_grad():
                row = model(torch.tensor([ids[: begin + len(segment)]])).logits[0, begin - 1 : -1].log_softmax(-1)
            found = row.gather(1, torch.tensor(segment.ids)[:, None])[:, 0]
            worst = max(worst, (found - torch.tensor(segment.logprobs)).abs().max().item())
            begin += len(segment)
    return worst


@pytest.mark.timeout(3600)
def test_no_agent_notices_what_happens_to_the_replicas(nano: Path, tmp_path: Path) -> None:
    model = nano / "model"

    async def scenario() -> tuple[list[list[Turn]], list[int], Account, Counter[str]]:
        journal, over = SqliteJournal(tmp_path / "journal.sqlite"), asyncio.Event()
        async with gateway_over_replicas(model, journal) as (chaos, gateway, recorder):
            running = asyncio.create_task(chaos.until(over))
            ends: list[tuple[str, int]] = []
            while not ends or chaos.events["update"] < UPDATES:
                ends += await asyncio.gather(*(agent(gateway, len(ends) + number) for number in range(SESSIONS)))
            over.set()
            await running
            taken = [recorder.take(session_id) for session_id, _ in ends]
            gateway.table.check_integrity()
            accounts = (assemble(record, TrainAll(), chaos.version).account for record in taken)
            account = sum(accounts, Account())
        journal.close()
        reader = JournalReader(tmp_path / "journal.sqlite")
        sessions = [[call.turn() for call in reader.read(session_id).calls] for session_id, _ in ends]
        return sessions, [used for _, used in ends], account, chaos.events

    sessions, used, account, events = asyncio.run(scenario())
    turns = [turn for session in sessions for turn in session]
    account.check_integrity()
    assert [sum(turn.generated for turn in session) for session in sessions] == used
    assert account.generated == sum(used) == account.trained
    assert all(len(session) == TURNS for session in sessions)
    versions = {segment.version for turn in turns for segment in turn.segments}
    several = sum(len(turn.segments) > 1 for turn in turns)
    error = largest_error(turns, Weights(model))
    said = (
        f"{len(sessions)} sessions x {TURNS} turns: {account.generated} tokens of {len(versions)} versions, {several}"
    )
    sys.stdout.write(f"{said} turns in several segments, logprob error {error:.2e}, {dict(events)}\n")
    assert error < 1e-3
    assert len(versions) > 1 and several > 0
