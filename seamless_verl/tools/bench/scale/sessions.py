"""The agents of the scale bench: sessions of several turns with a tool between two of them.

An agent opens its session, asks, uses its tool for a while, asks again with the conversation so far, and closes the
session; then the next one begins in its place. So the number of open sessions stays as it is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from time import perf_counter

from seamless_verl.tools.bench.gateway.arms import ADMIN_KEY, CHAT
from seamless_verl.tools.bench.gateway.load import MODEL, QUESTION, BenchConnection, Pacing, http_request

SETTLE_CALLS = 2  # of an agent on the mean, before the window


@dataclass(frozen=True)
class Work:
    """What each session does: `turns` calls of so many tokens, with a tool of `tool_s` seconds on the mean between two.

    The seconds of a tool are exponential, as the times of many independent causes are.
    """

    turns: int
    tool_s: float
    pacing: Pacing

    @property
    def turn_s(self) -> float:
        """Seconds from one call's begin to the next one's, where nothing waits."""
        return self.pacing.engine_s(self.pacing.tokens) + self.tool_s


@dataclass
class Served:
    """What the agents saw in a window: `late` is each call's time less what the engine takes, in seconds.

    `settled` is set when `settle_calls` have ended, in a window or not.
    """

    late: list[float] = field(default_factory=list)
    sessions: int = 0
    settle_calls: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    counting: bool = False

    def call_ended(self, late_s: float) -> None:
        self.settle_calls -= 1
        if self.settle_calls == 0:
            self.settled.set()
        if self.counting:
            self.late.append(late_s)

    def session_ended(self) -> None:
        self.sessions += self.counting


@dataclass(frozen=True)
class Agent:
    """One place of the load, with a connection of its own to one shard."""

    number: int
    port: int
    work: Work
    served: Served

    async def run(self) -> None:
        """Session after session, until it is cancelled.

        The first begins at a random moment of a turn and ends after a random turn. Else the agents of a full shard, who
        wait for the same, would stay in step: all would have short conversations at once, and then long ones.
        """
        draw = Random(self.number)
        connection = await BenchConnection.open("127.0.0.1", self.port)
        try:
            await asyncio.sleep(draw.uniform(0, self.work.turn_s))  # agents do not begin together
            turns = draw.randint(1, self.work.turns)
            while True:
                await self._session(connection, draw, turns)
                turns = self.work.turns
        finally:
            connection.close()

    async def _session(self, connection: BenchConnection, draw: Random, turns: int) -> None:
        opened = await connection.ask("/admin/sessions", {"uid": f"agent-{self.number}"}, ADMIN_KEY)
        messages: list[dict[str, str]] = [{"role": "user", "content": QUESTION}]
        for turn in range(turns):
            if turn:
                await asyncio.sleep(draw.expovariate(1 / self.work.tool_s))  # the tool
            messages = await self._turn(connection, f"/s/{opened['key']}{CHAT}", messages)
        await connection.ask(f"/admin/sessions/{opened['session_id']}/close", {}, ADMIN_KEY)
        self.served.session_ended()

    async def _turn(
        self, connection: BenchConnection, path: str, messages: list[dict[str, str]]
    ) -> list[dict[str, str]]:
        """The conversation with the reply and the tool's answer."""
        pacing = self.work.pacing
        body = {"model": MODEL, "messages": messages, "max_tokens": pacing.tokens}
        timing = await connection.send(http_request(path, json.dumps(body).encode()))
        self.served.call_ended(timing.whole - pacing.engine_s(pacing.tokens))
        reply = json.loads(connection.body)["choices"][0]["message"]["content"]
        return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "It says: nothing."}]


async def run_agents(
    sessions: int, ports: Sequence[int], work: Work, seconds: float, at_edge: Callable[[], None]
) -> tuple[Served, float]:
    """So many sessions at once, divided among the shards at `ports`; what they saw in a window, and how long it was.

    Before it all of them begin, and have `SETTLE_CALLS` calls each on the mean: full shards take longer for them than
    two turns. `at_edge` is called as the window begins, and as it ends.

    Raises:
        BadReplyError: a call failed.
    """
    served = Served(settle_calls=SETTLE_CALLS * sessions)
    async with asyncio.TaskGroup() as group:
        agents = [Agent(number, ports[number % len(ports)], work, served) for number in range(sessions)]
        tasks = [group.create_task(agent.run()) for agent in agents]
        await asyncio.sleep(SETTLE_CALLS * work.turn_s)  # so long shards that are not full need for these calls
        await served.settled.wait()
        at_edge()
        began, served.counting = perf_counter(), True
        await asyncio.sleep(seconds)  # the window
        served.counting, ended = False, perf_counter()
        at_edge()
        for task in tasks:
            task.cancel()
    return served, ended - began
