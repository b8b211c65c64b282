"""The runner: leases tasks of a run and runs agents on them, several at a time, until it is stopped.

A slot is ASKING for a task, RUNNING its agent, REPORTING, ASKING. A runner that is stopped gives its tasks back. When a
lease ends while its agent runs, the agent is cancelled, and nothing is reported. A report that the run does not accept
costs this one task; only what concerns the runner itself, its key and its protocol's version, ends the runner.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, cast

import msgspec

from seamless_verl.agents.callable import Agent, call_agent, run_agent
from seamless_verl.agents.command import AgentCommand, run_command
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.outcome import SCORED, AgentOutcome
from seamless_verl.agents.own_time import PausedFigures, PausedSeconds
from seamless_verl.client.connection import GIVE_BACK_S, RunConnection
from seamless_verl.client.messages import Heartbeat, RunStatus, TaskCompletion, TaskLease, TaskReturn
from seamless_verl.errors import OutsideApiError, shorten
from seamless_verl.runtime.scores import to_json_value, to_text

logger = logging.getLogger(__name__)
HEARTBEATS = 3  # in the time that a lease lasts
LEASE_ENDED = {404, 409, 410}
RunAgent: TypeAlias = Callable[[Mapping[str, Any], Endpoint, float, PausedSeconds], Awaitable[AgentOutcome]]
"""Runs an agent on a task to its end, within seconds of its own time."""


class TaskRefusedError(Exception):
    """Raised by an agent that cannot do a task here: another runner is to try it."""


def function_agent(agent: Agent) -> RunAgent:
    """A function `agent(task, endpoint)`, which may raise TaskRefusedError."""

    async def run(task: Mapping[str, Any], endpoint: Endpoint, limit_s: float, paused: PausedSeconds) -> AgentOutcome:
        raised: list[TaskRefusedError] = []

        async def watched(task: Mapping[str, Any], endpoint: Endpoint) -> Any:
            try:
                return await run_agent(agent, dict(task), endpoint)
            except TaskRefusedError as error:
                raised.append(error)
                raise

        outcome = await call_agent(watched, task, endpoint, time_limit_s=limit_s, paused=paused)
        if raised:
            raise raised[0]
        return outcome

    return run


def command_agent(command: AgentCommand) -> RunAgent:
    """A command line."""

    async def run(task: Mapping[str, Any], endpoint: Endpoint, limit_s: float, paused: PausedSeconds) -> AgentOutcome:
        return await run_command(command.limited(limit_s), task, endpoint, paused=paused)

    return run


class Runner:
    """Runs agents, by name, on tasks of the run behind `connection`, at most `slots` at a time."""

    def __init__(self, connection: RunConnection, agents: Mapping[str, RunAgent], *, slots: int = 1) -> None:
        self._connection, self._agents, self._slots = connection, dict(agents), slots
        self.done = 0  # tasks whose result the run accepted
        self.held = 0  # tasks that it had when it was stopped
        self.given_back = 0  # those of them that the run took back

    async def run(self, *, max_tasks: int | None = None) -> None:
        """Works until it is cancelled, or each slot has done its share of `max_tasks`.

        Raises:
            OutsideApiError: the run refuses this runner: its key, or the version of its protocol.
        """
        shares = [
            None if max_tasks is None else len(range(slot, max_tasks, self._slots)) for slot in range(self._slots)
        ]
        slots = [asyncio.create_task(self._work(share), name="slot") for share in shares]
        try:
            await asyncio.wait(slots, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            # Each is cancelled once: a slot that is cancelled again meanwhile does not give its task back.
            await ended(*slots)
        for slot in slots:
            if not slot.cancelled():
                slot.result()

    async def _work(self, share: int | None) -> None:
        worked = 0
        while share is None or worked < share:
            lease = await self._connection.lease(sorted(self._agents))
            if lease is not None:
                await self._work_on(lease)
                worked += 1

    async def _work_on(self, lease: TaskLease) -> None:
        paused = PausedByRun(self._connection, lease)
        endpoint = Endpoint(f"{self._connection.url}/s/{lease.key}", lease.key, lease.session_id)
        agent = self._agents[lease.agent](lease.task, endpoint, lease.time_limit_s, paused)
        running = asyncio.ensure_future(agent)
        beating = asyncio.create_task(self._give_signs(paused), name="heartbeat")
        try:
            await asyncio.wait({running, beating}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                await ended(beating)  # a sign of life that arrives after the report would be refused
                await self._report(lease, running)
            else:
                logger.warning("task %s: its agent is cancelled: %s", lease.task_id, beating.exception())
        except asyncio.CancelledError:
            self.held += 1
            await ended(running, beating)  # nothing of the agent runs when another runner begins
            await self._give_back_in_time(lease)
            raise
        finally:
            await ended(running, beating)

    async def _give_signs(self, paused: PausedByRun) -> None:
        """Extends the lease; raises OutsideApiError when it has ended."""
        while True:
            began = time.monotonic()
            beat = await paused.heartbeat()
            rest = beat.lease_s / HEARTBEATS - (time.monotonic() - began)
            await asyncio.sleep(max(0.0, rest))  # a heartbeat is a time, not an event

    async def _report(self, lease: TaskLease, running: asyncio.Future[AgentOutcome]) -> None:
        if isinstance(refusal := running.exception(), TaskRefusedError):
            await self._give_back(lease, TaskReturn(to_text(str(refusal)), refused=True))
            return
        completion = completion_of(running)
        refused = await self._complete(lease, completion)
        if refused is not None:  # as of a result that is too large
            error = to_text(shorten(f"the run did not take its result: {refused}"))
            failed = msgspec.structs.replace(completion, status="failed", reward=None, reward_info={}, error=error)
            refused = await self._complete(lease, failed)
        if refused is not None:
            await self._give_back(lease, TaskReturn(to_text(shorten(refused)), refused=True))

    async def _complete(self, lease: TaskLease, completion: TaskCompletion) -> OutsideApiError | None:
        """Reports how the agent ended; returns the run's refusal of this completion, None if it was taken, or came
        after the lease's end. Raises OutsideApiError when the run refuses the runner."""
        try:
            await self._connection.complete(lease, completion)
        except OutsideApiError as error:
            if concerns_runner(error):
                raise
            logger.warning("task %s: its result was not taken: %s", lease.task_id, error)
            return None if error.status in LEASE_ENDED else error
        self.done += 1
        return None

    async def _give_back(self, lease: TaskLease, body: TaskReturn) -> None:
        try:
            await self._connection.give_back(lease, body)
        except OutsideApiError as error:
            if concerns_runner(error):
                raise
            # The run has taken the task from this runner already, or will when the lease expires.
            logger.warning("task %s: %s", lease.task_id, error)

    async def _give_back_in_time(self, lease: TaskLease) -> None:
        """Gives the task back, of a runner that stops: what the run does not take expires with its lease."""
        try:
            async with asyncio.timeout(GIVE_BACK_S):
                await self._connection.give_back(lease, TaskReturn("the runner was stopped"))
        except (OutsideApiError, TimeoutError) as error:
            if not isinstance(error, OutsideApiError) or error.status not in LEASE_ENDED:
                reason = str(error) or f"no reply within {GIVE_BACK_S:g} s"
                logger.warning("task %s was not given back: %s", lease.task_id, reason)
                return
        self.given_back += 1


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancels the tasks, and returns when they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class PausedByRun:
    """A PausedSeconds of the lease's session, which knows the figures of all heartbeats."""

    def __init__(self, connection: RunConnection, lease: TaskLease) -> None:
        self._connection, self._lease, self._figures = connection, lease, PausedFigures()
        self._order = asyncio.Lock()  # an older figure after a newer one would look like a restart

    async def heartbeat(self) -> Heartbeat:
        """Extends the lease; raises OutsideApiError when it has ended."""
        async with self._order:
            beat = await self._connection.heartbeat(self._lease)
            self._figures.add(beat.paused_s)
            return beat

    async def __call__(self) -> float:
        await self.heartbeat()
        return self._figures.total


def concerns_runner(error: OutsideApiError) -> bool:
    """Whether the run, or a proxy before it, refuses the runner, so that it refuses each of its tasks too."""
    return error.status == 401 or error.code == "protocol_version"


def completion_of(running: asyncio.Future[AgentOutcome]) -> TaskCompletion:
    """How the agent ended, as the run is told; it can be encoded as JSON, whatever the agent returned or raised."""
    if (error := running.exception()) is not None:  # a field of a command that the task does not have
        return TaskCompletion("failed", error=to_text(f"{type(error).__name__}: {error}"))
    outcome = running.result()
    reward = outcome.reward if outcome.status in SCORED else None
    error_text = "\n".join(filter(None, (outcome.error, outcome.output if outcome.error else "")))
    status = cast(RunStatus, str(outcome.status))
    info = to_json_value(outcome.reward_info)
    return TaskCompletion(status, reward, info, to_text(error_text), outcome.duration_s)


async def run_until_stopped(runner: Runner, *, max_tasks: int | None = None) -> None:
    """Runs it until SIGINT or SIGTERM; its tasks are then given back. A second signal ends it without that."""
    work = asyncio.ensure_future(runner.run(max_tasks=max_tasks))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    try:
        await work
    except asyncio.CancelledError:
        kept = runner.held - runner.given_back
        if kept:
            logger.warning(
                "stopped; the run did not take back %s of its %s tasks, and gives them to others when their leases "
                "expire",
                kept,
                runner.held,
            )
        else:
            logger.info("stopped; its tasks were given back" if runner.held else "stopped; it had no tasks")
