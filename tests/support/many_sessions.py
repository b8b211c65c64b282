"""Very many short sessions through a data plane, of the kinds that a run has, each as cheap as it can really be."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from seamless_verl.client import AdminFile
from seamless_verl.data_plane.finished_sessions import AgentResult, HandedNote
from seamless_verl.data_plane.group_notifier import GroupEnd
from seamless_verl.data_plane.lease_book import LeaseTerms, TaskOrder
from seamless_verl.journal import GroupDecided, GroupOutcome
from seamless_verl.tools.bench.load import BadReplyError, BenchConnection, http_request

AGENTS = 16  # at once
STEP = 128  # sessions of a training step
LONG_S = 600.0
# The same in all sessions: of texts the tokenizer remembers 10,000 words, and the prompt cache those of a minute.
QUESTION = "What is two and two?"
Method = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class Sample:
    """A session's place: `number` is its own in the run, `uid` that of its prompt; `agent` is its agent's name."""

    uid: str
    number: int
    step: int
    agent: str

    @property
    def opening(self) -> dict[str, Any]:
        metadata = {"session": str(self.number), "step": self.step}
        return {"uid": self.uid, "limits": {"lifetime": LONG_S}, "metadata": metadata}

    @property
    def order(self) -> TaskOrder:
        task = {"prompt": [{"role": "user", "content": QUESTION}], "number": self.number}
        terms = LeaseTerms(self.agent, LONG_S, None, 8)
        return TaskOrder(f"task-{self.number}", task, self.opening, LONG_S, terms)


class Run:
    """The trainer, agent loops, agents and runners of a run.

    `method` gives a method of the data plane by its name, and `commit` commits a version of the weights. Of the
    sessions of a step, each is of the next of `kinds`, and `group` of them are of one prompt.
    """

    def __init__(
        self,
        found: AdminFile,
        method: Callable[[str], Method],
        commit: Callable[[int], Awaitable[Any]],
        *,
        kinds: Sequence[Callable[[Run, Sample], Awaitable[Any]]],
        group: int,
    ) -> None:
        self.found, self.method, self._commit, self._kinds, self._group = found, method, commit, kinds, group
        self._connections: list[BenchConnection] = []
        self.ended = self.step = 0

    async def __aenter__(self) -> Run:
        address = urlsplit(self.found.url)
        assert address.hostname is not None and address.port is not None
        self._connections += [await BenchConnection.open(address.hostname, address.port) for _ in range(AGENTS)]
        await self.method("begin_run")("run", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()

    async def train_step(self) -> None:
        """A step with its sessions, and what the trainer asks for at its end: outcomes, metrics, and a commit."""
        self.step += 1
        numbers = range(self.ended, self.ended + STEP)
        waiting = [(f"u{number // self._group}", number) for number in reversed(numbers)]
        async with asyncio.TaskGroup() as agents:
            for agent in range(AGENTS):
                agents.create_task(self._run_agent(f"agent-{agent}", waiting))
        self.ended += STEP
        await self._decide(list(dict.fromkeys(f"u{number // self._group}" for number in numbers)))
        await self.method("observe")([])
        await self.method("waits")()
        await self.method("checked_metrics")()
        await self._commit(self.step)

    async def _run_agent(self, agent: str, waiting: list[tuple[str, int]]) -> None:
        while waiting:
            uid, number = waiting.pop()
            await self._kinds[number % len(self._kinds)](self, Sample(uid, number, self.step, agent))

    async def _decide(self, uids: Sequence[str]) -> None:
        """The first group is deferred, the second one dropped, and the others are trained."""
        outcomes = [GroupOutcome.DEFERRED, GroupOutcome.STALE, *[GroupOutcome.TRAINED] * len(uids)]
        for outcome in outcomes[: len(uids)]:
            await self.method("notify_group_ended")(GroupEnd(sessions=1, deferred=outcome is GroupOutcome.DEFERRED))
        decided = zip(uids, outcomes, strict=False)
        await self.method("record_groups")([GroupDecided(uid, outcome, self.step) for uid, outcome in decided])
        await self.method("wait_for_groups")(0, 1.0)

    async def post(self, path: str, body: Any, key: str = "none") -> Any:
        """The reply's JSON, None for a stream."""
        connection = self._connections.pop()  # there is one for each agent
        try:
            await connection.send(http_request(path, json.dumps(body).encode(), key))
            return json.loads(connection.body) if connection.body.startswith(b"{") else None
        finally:
            self._connections.append(connection)

    async def call(self, key: str, **body: Any) -> Any:
        """A call of the chat API."""
        messages = [{"role": "user", "content": QUESTION}]
        return await self.post(
            f"/s/{key}/v1/chat/completions", {"model": "policy", "messages": messages, "max_tokens": 4} | body
        )

    async def refused_call(self, key: str, **body: Any) -> None:
        try:
            await self.call(key, **body)
        except BadReplyError:
            return
        raise AssertionError("it was served")

    async def end(self, session_id: str, sample: Sample, kept: bool = True) -> None:
        """What an agent loop does at the end of a session."""
        result = AgentResult("finished" if kept else "failed", 0.5)
        await self.method("close_session")(session_id, result.status, result)
        await self.method("acknowledge")(session_id, kept, HandedNote(sample.uid, rewards={"reward": 0.5}))

    async def lease(self, sample: Sample) -> Any:
        body = {"protocol": 2, "runner": "r", "agents": [sample.agent], "wait_s": 10.0}
        return (await self.post("/runner/lease", body, self.found.runner_key))["lease"]

    async def end_lease(self, lease: Any, how: str, **body: Any) -> None:
        await self.post(f"/runner/leases/{lease['lease_id']}/{how}", body, self.found.runner_key)


async def chat(run: Run, sample: Sample) -> str:
    opened = await run.method("open_session")(sample.opening)
    await run.call(opened["key"])
    await run.end(opened["session_id"], sample)
    return str(opened["key"])


async def late(run: Run, sample: Sample) -> None:
    """Its agent outlives it."""
    await run.refused_call(await chat(run, sample))


async def failed(run: Run, sample: Sample) -> None:
    opened = await run.method("open_session")(sample.opening)
    await run.refused_call(opened["key"], max_tokens=-1)
    await run.call(opened["key"])
    await run.end(opened["session_id"], sample, kept=False)


async def other_apis(run: Run, sample: Sample) -> None:
    opened = await run.method("open_session")(sample.opening)
    body: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
    await run.post(f"/s/{opened['key']}/v1/messages", body)
    stored = {"model": "policy", "input": QUESTION, "max_output_tokens": 4}
    await run.post(f"/s/{opened['key']}/v1/responses", stored)
    await run.end(opened["session_id"], sample)


async def streamed(run: Run, sample: Sample) -> None:
    opened = await run.method("open_session")(sample.opening)
    await run.call(opened["key"], stream=True)
    await run.post(f"/s/{opened['key']}/v1/session/reward", {"reward": 1.0})
    await run.end(opened["session_id"], sample)


async def two_turns(run: Run, sample: Sample) -> None:
    opened = await run.method("open_session")(sample.opening)
    reply = await run.call(opened["key"])
    question = {"role": "user", "content": QUESTION}
    await run.call(opened["key"], messages=[question, reply["choices"][0]["message"], question])
    await run.end(opened["session_id"], sample)


async def unused(run: Run, sample: Sample) -> None:
    opened = await run.method("open_session")(sample.opening)
    await run.end(opened["session_id"], sample, kept=False)


async def opened_outside(run: Run, sample: Sample) -> None:
    """A program opened it over HTTP: nobody trains it."""
    opened = await run.post("/admin/sessions", sample.opening, run.found.key)
    await run.call(opened["key"])
    await run.post(f"/admin/sessions/{opened['session_id']}/close", {}, run.found.key)


async def call_of_a_loop(run: Run, sample: Sample) -> None:
    """Of verl's own agent loops, which have no session: a conversation and a prompt that come once."""
    number = sample.number
    prompt = [number % 128, number // 128 % 128, number // 128**2 % 128]
    await run.method("generate")(f"request-{number}", prompt, {"max_tokens": 4}, sample.uid)


async def task(run: Run, sample: Sample) -> None:
    running = asyncio.ensure_future(run.method("run_task")(sample.order))
    lease = await run.lease(sample)
    await run.call(lease["key"])
    await run.end_lease(lease, "complete", status="finished", reward=0.5)
    await run.end((await running).session_id, sample)


async def task_given_back(run: Run, sample: Sample) -> None:
    running = asyncio.ensure_future(run.method("run_task")(sample.order))
    given_back = await run.lease(sample)
    await run.call(given_back["key"])
    await run.end_lease(given_back, "return", reason="it stops", refused=False)
    lease = await run.lease(sample)
    await run.end_lease(lease, "complete", status="finished", reward=0.5)
    await run.end((await running).session_id, sample)


async def task_withdrawn(run: Run, sample: Sample) -> None:
    running = asyncio.ensure_future(run.method("run_task")(sample.order))
    lease = await run.lease(sample)
    await run.call(lease["key"])
    running.cancel()
    await asyncio.wait({running})


async def all_that_is_remembered(run: Run, sample: Sample) -> None:
    """Of each thing that a data plane remembers one more, and no more work than that: a lease, its session, its group
    where it is of a prompt of its own, and a conversation with a prompt."""
    running = asyncio.ensure_future(run.method("run_task")(sample.order))
    lease = await run.lease(sample)
    await call_of_a_loop(run, sample)
    await run.end_lease(lease, "complete", status="finished", reward=0.5)
    await run.end((await running).session_id, sample)


KINDS = (chat, late, task, failed, other_apis, streamed, two_turns, unused, opened_outside, call_of_a_loop, task)
KINDS += (task_given_back, task_withdrawn)
