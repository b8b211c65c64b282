"""Agent loops of verl that run a user's own agent against a session of the gateway.

They are entries of the file `actor_rollout_ref.rollout.agent.agent_loop_config_path`, as verl's own loops are.
docs/settings.md has examples, agents/settings.py the schema of an entry.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache, partial
from inspect import signature
from typing import Any, ClassVar

import numpy as np
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from seamless_verl.agent_loops.group import GROUP, UNTRAINABLE, warn_of
from seamless_verl.agent_loops.rows import SessionOutputs, outputs_of, rewards_of
from seamless_verl.agents.callable import call_agent, load_agent
from seamless_verl.agents.command import run_command
from seamless_verl.agents.endpoint import Endpoint, around_proxy
from seamless_verl.agents.outcome import ERROR_CHARS, OWN_FAILURES, SCORED, AgentOutcome, AgentStatus
from seamless_verl.agents.own_time import PausedSeconds
from seamless_verl.agents.settings import (
    CallableSettings,
    CommandSettings,
    LoopSettings,
    RunnerSettings,
    read_settings,
)
from seamless_verl.algorithms import OF_TURNS
from seamless_verl.config.verl_keys import ESTIMATOR
from seamless_verl.data_plane.client import (
    await_reply,
    discard_session,
    open_session,
    plane_for,
    run_task,
    take_up_session,
)
from seamless_verl.data_plane.earlier_sessions import STEP
from seamless_verl.data_plane.finished_sessions import AgentResult, FinishedSession, HandedNote
from seamless_verl.data_plane.group_notifier import UNSCORED
from seamless_verl.data_plane.lease_book import DONE, LeaseTerms, TaskOrder
from seamless_verl.errors import shorten
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.session import Closed

logger = logging.getLogger(__name__)
OF_VERL = (*signature(AgentLoopBase.__init__).parameters, "tools")  # what verl gives to every loop
DROPPED_AS = {
    AgentStatus.FAILED: DropReason.AGENT_FAILED,
    AgentStatus.OUTPUT_LIMIT: DropReason.AGENT_FAILED,
    AgentStatus.TOOL_FAILED: DropReason.TOOL_FAILED,
    AgentStatus.ENGINE_FAILED: DropReason.ENGINE_FAILED,
    AgentStatus.EXPIRED: DropReason.EXPIRED,
    AgentStatus.TIMED_OUT: DropReason.TIMED_OUT,
    AgentStatus.INVALID_REWARD: DropReason.REWARD,
}
"""What tokens are counted as, when a session is dropped whose agent ended so; any other as those of a session."""
FAILED_BY = {
    Closed.EXPIRED: AgentStatus.EXPIRED,
    Closed.LIMIT: AgentStatus.LIMIT,
    Closed.TOOL_FAILED: AgentStatus.TOOL_FAILED,
    Closed.ENGINE_FAILED: AgentStatus.ENGINE_FAILED,
    Closed.ABANDONED: AgentStatus.CANCELLED,
}
"""How an agent ended that failed, by why its session had been closed."""
VERLS = {  # columns of a row that are verl's own, and no part of the task
    *("raw_prompt", "agent_name", "dummy_tensor", "tools_kwargs", "interaction_kwargs", "multi_modal_data"),
    *("session_id", "global_steps", "validate"),
}


class AgentFailedError(RuntimeError):
    """An agent failed, generated nothing that can be trained, or has no score: its session is left out of its group.

    `kind` is how it failed: an AgentStatus, UNTRAINABLE, UNSCORED, or the state of a task that no runner did.
    """

    def __init__(self, reason: str, kind: str) -> None:
        super().__init__(reason, kind)
        self.kind = kind

    def __str__(self) -> str:
        return str(self.args[0])


class SessionAgentLoop(AgentLoopBase, ABC):  # type: ignore[misc]
    """Opens one session for each run; the trainer's sampling parameters win over the agent's.

    A session is scored whose agent ended by itself or at a limit. One whose agent failed has the reward
    `failure_reward`; with None, or where a tool or an engine failed, it is left out of its group. What becomes of one
    whose agent ran out of time is set by `on_timeout`. A worker with a group reports when the outputs are stored; a
    user's own worker has none.
    """

    SETTINGS: ClassVar[type[LoopSettings]] = LoopSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what verl gives a loop and the keys of the entry; raises ConfigError for an entry that cannot work."""
        entry = {item.name: kwargs.pop(item.name) for item in fields(self.SETTINGS) if item.name in kwargs}
        super().__init__(*args, **{name: kwargs.pop(name) for name in OF_VERL if name in kwargs})
        key = str(entry.get("name", "agent loop"))
        self.settings = read_settings(self.SETTINGS, entry | kwargs, key=key)  # what is left is refused by name

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        name = f"{kwargs['uid']}_{kwargs['session_id']}"  # the prefix of TransferQueue's keys
        plane, started = plane_for(self.config, name), time.monotonic()
        opening = self.settings.opening(
            str(kwargs["uid"]),
            str(kwargs["session_id"]),
            sampling_params=sampling_params,
            max_tokens=self.rollout_config.response_length,
            validation=validates(),
        )
        if "global_steps" in kwargs:
            opening["metadata"][STEP] = int(kwargs["global_steps"])
        if (taken := await self._taken_up(plane, kwargs)) is not None:
            session_id, outcome, session = taken
        else:
            session_id, outcome = await self.run_session(plane, name, opening, task_of(kwargs))
            session = await close_session(plane, session_id, outcome)
        if outcome.status is AgentStatus.FAILED:
            outcome = replace(outcome, status=FAILED_BY.get(session.closed, outcome.status))
        try:
            reward = self.reward(outcome, session, name)
            if not session.sequences:
                reason = f"session {session_id} of prompt {kwargs['uid']} left nothing to train"
                raise AgentFailedError(f"{reason}: {session.untrained}; {describe(outcome)}", UNTRAINABLE)
        except AgentFailedError as error:
            dropped = DROPPED_AS.get(outcome.status, DropReason.SESSION)
            note = HandedNote(str(kwargs["uid"]), shorten(error), dropped=dropped)
            await await_reply(plane.acknowledge.remote(session_id, False, note))
            raise
        warn_of_unread(self.config, session)
        outputs = outputs_of(session, reward, time.monotonic() - started, of_turns=compares_turns(self.config))
        if (group := GROUP.get(None)) is not None:
            group.limited += outcome.status is AgentStatus.LIMIT
        else:
            note = HandedNote(str(kwargs["uid"]), rewards=rewards_of(outputs[-1]))
            await await_reply(plane.acknowledge.remote(session_id, True, note))
        failure = () if outcome.status in SCORED else (str(outcome.status), self.why_failed(outcome))
        return SessionOutputs(outputs, plane, session_id, *failure)

    async def _taken_up(
        self, plane: Any, sample: Mapping[str, Any]
    ) -> tuple[str, AgentOutcome, FinishedSession] | None:
        """The session that an earlier start of the run ended in the place of this one, as its agent ended then."""
        if "global_steps" not in sample:  # a worker of the user's own
            return None
        place = (str(sample["uid"]), str(sample["session_id"]), int(sample["global_steps"]))
        taken = await take_up_session(plane, *place, dropped_as)
        if taken is None:
            return None
        outcome = AgentOutcome(AgentStatus(taken.result.status), 0.0, reward=taken.result.reward)
        return taken.session_id, outcome, taken.session

    @abstractmethod
    async def run_session(
        self, plane: Any, name: str, opening: dict[str, Any], task: dict[str, Any]
    ) -> tuple[str, AgentOutcome]:
        """Opens a session and has an agent run on it; returns the session's id, and how the agent ended.

        If it raises, or is cancelled, no session is left open.
        """

    def reward(self, outcome: AgentOutcome, session: FinishedSession, name: str = "") -> float | None:
        """The reward that the agent returned, or that was posted; None leaves it to verl's reward manager."""
        if outcome.status in SCORED:
            return outcome.reward if outcome.reward is not None else session.rewards.get("reward")
        if outcome.status is AgentStatus.INVALID_REWARD:
            if GROUP.get(None) is not None:
                return math.nan  # which our worker neither trains nor takes for a zero
            raise AgentFailedError(self.why_failed(outcome), UNSCORED)
        timed_out, reward = outcome.status is AgentStatus.TIMED_OUT, self.settings.failure_reward
        scored = self.settings.on_timeout == "score" if timed_out else reward is not None
        if not scored or not (timed_out or outcome.status in OWN_FAILURES):
            raise AgentFailedError(describe(outcome), str(outcome.status))
        if timed_out:
            reward = session.rewards.get("reward", reward)
        given = "by the reward manager" if reward is None else reward
        kind = f"rewarded {outcome.status}"
        warn_of(kind, f"session {name} failed and is rewarded {given}: {shorten(describe(outcome))}")
        return reward

    def why_failed(self, outcome: AgentOutcome) -> str:
        """With the agent's name where what it returned is at fault."""
        if outcome.status is not AgentStatus.INVALID_REWARD:
            return describe(outcome)
        agent = getattr(self.settings, "agent", None) or getattr(self.settings, "command", self.settings.name)
        return f"the agent {agent}: {outcome.error}"


class LocalAgentLoop(SessionAgentLoop):
    """Runs the agent in this process, or below it."""

    @abstractmethod
    async def run_agent(self, task: Mapping[str, Any], endpoint: Endpoint, paused: PausedSeconds) -> AgentOutcome:
        """Run the agent to its end, within `settings.time_limit_s`, which does not count the `paused` seconds."""

    async def run_session(
        self, plane: Any, name: str, opening: dict[str, Any], task: dict[str, Any]
    ) -> tuple[str, AgentOutcome]:
        opened = await open_session(plane, opening)
        endpoint = Endpoint(opened["anthropic_base_url"], opened["key"], opened["session_id"])
        os.environ.update(around_proxy(endpoint, os.environ))  # for the SDKs in an agent of this process
        if (group := GROUP.get(None)) is not None:
            group.opened(endpoint.session_id)
        try:
            paused = partial(paused_seconds, plane, endpoint.session_id)
            return endpoint.session_id, await self.run_agent(task, endpoint, paused)
        except asyncio.CancelledError:
            await discard_session(plane, endpoint.session_id, Closed.ABANDONED, dropped_as())
            raise
        except Exception:  # whatever the agent raised: its session ends, and verl gets the error
            await discard_session(plane, endpoint.session_id, Closed.FAILED)
            raise


class CallableAgentLoop(LocalAgentLoop):
    """Runs a function `agent(task, endpoint)`, named as "package.module:name" or "path/file.py:name"."""

    SETTINGS = CallableSettings
    settings: CallableSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent = load_agent(self.settings.agent, key="agent")

    async def run_agent(self, task: Mapping[str, Any], endpoint: Endpoint, paused: PausedSeconds) -> AgentOutcome:
        return await call_agent(self.agent, task, endpoint, time_limit_s=self.settings.time_limit_s, paused=paused)


class CommandAgentLoop(LocalAgentLoop):
    """Runs a command line in a scratch folder of its own, copied from `folder`."""

    SETTINGS = CommandSettings
    settings: CommandSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.command = self.settings.agent_command

    async def run_agent(self, task: Mapping[str, Any], endpoint: Endpoint, paused: PausedSeconds) -> AgentOutcome:
        return await run_command(self.command, task, endpoint, paused=paused)


class RunnerAgentLoop(SessionAgentLoop):
    """Has a runner, a process outside of the run that asks for tasks over HTTP, run the agent."""

    SETTINGS = RunnerSettings
    settings: RunnerSettings

    async def run_session(
        self, plane: Any, name: str, opening: dict[str, Any], task: dict[str, Any]
    ) -> tuple[str, AgentOutcome]:
        """Submits the task, and returns what its last runner said; raises AgentFailedError where none could do it."""
        settings = self.settings
        terms = LeaseTerms(settings.agent, settings.lease_s, settings.claim_s, settings.max_attempts, validates())
        task_id = f"{name}_{uuid.uuid4().hex[:8]}"  # a group that is replaced may have the same name again
        order = TaskOrder(task_id, task, opening, settings.time_limit_s, terms)
        result = await run_task(plane, order, dropped_as)
        if result.state is not DONE:
            raise AgentFailedError(f"the task {task_id} is {result.state}: {result.error}", str(result.state))
        outcome = result.outcome
        status, error = AgentStatus(outcome["status"]), str(outcome["error"])[:ERROR_CHARS]
        ended = AgentOutcome(status, outcome["duration_s"], error=error, reward=outcome["reward"])
        return result.session_id, replace(ended, reward_info=dict(outcome["reward_info"]))


def validates() -> bool:
    """Whether the session that runs here is of a validation."""
    return (group := GROUP.get(None)) is not None and bool(group.validation)


def compares_turns(config: Any) -> bool:
    """Whether the run's advantage estimator reads the turns of a session."""
    return OmegaConf.select(config, ESTIMATOR) in OF_TURNS


def warn_of_unread(config: Any, session: FinishedSession) -> None:
    """Says once in a process that rewards of calls are not read by the run's advantage estimator."""
    if not compares_turns(config) and any(note.reward for note in session.trained_turns.values()):
        estimator = OmegaConf.select(config, ESTIMATOR)
        warn_once(f"{ESTIMATOR}={estimator}: does not read the rewards of calls. Set {ESTIMATOR}={OF_TURNS[0]}")


@cache
def warn_once(message: str) -> None:
    logger.warning("%s", message)


def describe(outcome: AgentOutcome) -> str:
    """How an agent ended, with its error and the end of its output."""
    return "\n".join(filter(None, (f"the agent {outcome.status}", outcome.error, outcome.output)))


async def close_session(plane: Any, session_id: str, outcome: AgentOutcome) -> FinishedSession:
    """The result of a session whose agent has ended; a task that is cancelled meanwhile drops it."""
    result = AgentResult(str(outcome.status), outcome.reward)
    closing = plane.close_session.remote(session_id, closing_reason(outcome), result)
    try:
        session: FinishedSession = await await_reply(closing)
    except asyncio.CancelledError:
        await discard_session(plane, session_id, Closed.ABANDONED, dropped_as())
        raise
    return session


def dropped_as() -> DropReason:
    """What the tokens of a session of this task's group are counted as, when it is stopped."""
    return DropReason.SESSION if (group := GROUP.get(None)) is None else group.stopped_as


def closing_reason(outcome: AgentOutcome) -> Closed:
    """Why the session of an agent that ended so is closed."""
    return Closed(str(outcome.status)) if outcome.status in set(Closed) else Closed.FAILED


async def paused_seconds(plane: Any, session_id: str) -> float:
    """Seconds in which calls of the session waited for a replica, or were on one that was paused."""
    seconds: float = await await_reply(plane.paused_seconds.remote(session_id), cancels=True)
    return seconds


def task_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The task that an agent gets for a row of the data set, as plain JSON values; the messages are under `prompt`.

    Columns with other values, such as images, are left out.
    """
    columns = {name: plain(value) for name, value in sample.items() if name not in VERLS}
    task = {name: value for name, value in columns.items() if is_json(value)}
    return {**task, "prompt": plain(sample.get("raw_prompt"))}


def is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(is_json, value.values()))
    if isinstance(value, list):
        return all(map(is_json, value))
    return value is None or isinstance(value, str | int | float)


def plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(inner) for inner in value]
    return value
