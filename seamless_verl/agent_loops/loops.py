"""Agent loops of verl that run a user's own agent against a session of the gateway.

They are entries of the file `actor_rollout_ref.rollout.agent.agent_loop_config_path`, as verl's own loops are:

    - name: calculator
      _target_: seamless_verl.agent_loops.loops.CallableAgentLoop
      agent: path/to/agent.py:run
      time_limit_s: 60
    - name: shell
      _target_: seamless_verl.agent_loops.loops.CommandAgentLoop
      command: [python, agent.py]
      session: {max_turns: 20, max_tokens: 8192, max_concurrent: 4}
      sampling: {min_p: 0.02, seed: 7}
      limits: {cpu_s: 30, file_bytes: 10485760}

agents/settings.py has the schema of an entry.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from seamless_verl.agent_loops.rows import SessionOutputs, outputs_of
from seamless_verl.agents.callable import call_agent, load_agent
from seamless_verl.agents.command import run_command
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus
from seamless_verl.agents.settings import CallableSettings, CommandSettings, LoopSettings, read_settings
from seamless_verl.data_plane.actor import FinishedSession
from seamless_verl.data_plane.client import await_reply, discard_session, open_session, plane_for
from seamless_verl.trajectory.session import Closed

logger = logging.getLogger(__name__)
TASK = ("raw_prompt", "data_source", "reward_model", "extra_info", "uid", "index")


class AgentFailedError(RuntimeError):
    """An agent failed, or generated nothing that can be trained; verl replaces its group."""


class SessionAgentLoop(AgentLoopBase, ABC):  # type: ignore[misc]
    """Opens one session for each run; the trainer's sampling parameters win over the agent's.

    A session whose agent failed or ran out of time has the reward `failure_reward`; with None it fails, and
    verl replaces its group. `confirmed`: the worker that runs the loop reports when the outputs are stored.
    """

    SETTINGS: ClassVar[type[LoopSettings]] = LoopSettings
    confirmed = False  # a user's own worker does not report it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what verl gives a loop and the keys of the entry; raises ConfigError for an entry that cannot work."""
        entry = {item.name: kwargs.pop(item.name) for item in fields(self.SETTINGS) if item.name in kwargs}
        super().__init__(*args, **kwargs)
        self.settings = read_settings(self.SETTINGS, entry, key=str(entry.get("name", "agent loop")))

    @abstractmethod
    async def run_agent(self, task: Mapping[str, Any], endpoint: Endpoint) -> AgentOutcome:
        """Run the agent to its end, within `settings.time_limit_s`."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        name = f"{kwargs['uid']}_{kwargs['session_id']}"  # the prefix of TransferQueue's keys
        plane, started = plane_for(self.config, name), time.monotonic()
        opening = self.settings.opening(
            str(kwargs["uid"]),
            str(kwargs["session_id"]),
            sampling_params=sampling_params,
            max_tokens=self.rollout_config.response_length,
        )
        opened = await open_session(plane, opening)
        endpoint = Endpoint(opened["anthropic_base_url"], opened["key"], opened["session_id"])
        try:
            outcome = await self.run_agent(task_of(kwargs), endpoint)
        except asyncio.CancelledError:
            await discard_session(plane, endpoint.session_id, Closed.ABANDONED)
            raise
        except Exception:
            await discard_session(plane, endpoint.session_id, Closed.FAILED)
            raise
        reason = Closed.FINISHED if outcome.status is AgentStatus.FINISHED else Closed.FAILED
        session = await await_reply(plane.close_session.remote(endpoint.session_id, reason))
        try:
            reward = self.reward(outcome, session)
            if not session.sequences:
                raise AgentFailedError(f"session {endpoint.session_id} left nothing to train: {describe(outcome)}")
        except AgentFailedError:
            await await_reply(plane.acknowledge.remote(endpoint.session_id, kept=False))
            raise
        outputs = outputs_of(session, reward, time.monotonic() - started)
        if not self.confirmed:
            await await_reply(plane.acknowledge.remote(endpoint.session_id))
        return SessionOutputs(outputs, plane, endpoint.session_id)

    def reward(self, outcome: AgentOutcome, session: FinishedSession) -> float | None:
        """The reward that the agent returned, or that was posted; None leaves it to verl's reward manager."""
        if outcome.status is AgentStatus.FINISHED:
            return outcome.reward if outcome.reward is not None else session.rewards.get("reward")
        if self.settings.failure_reward is None:
            raise AgentFailedError(describe(outcome))
        logger.warning("rewarded %s: %s", self.settings.failure_reward, describe(outcome))
        return self.settings.failure_reward


class CallableAgentLoop(SessionAgentLoop):
    """Runs a function `agent(task, endpoint)`, named as "package.module:name" or "path/file.py:name"."""

    SETTINGS = CallableSettings
    settings: CallableSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent = load_agent(self.settings.agent, key="agent")

    async def run_agent(self, task: Mapping[str, Any], endpoint: Endpoint) -> AgentOutcome:
        return await call_agent(self.agent, task, endpoint, time_limit_s=self.settings.time_limit_s)


class CommandAgentLoop(SessionAgentLoop):
    """Runs a command line in a scratch folder of its own, copied from `folder`."""

    SETTINGS = CommandSettings
    settings: CommandSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.command = self.settings.agent_command

    async def run_agent(self, task: Mapping[str, Any], endpoint: Endpoint) -> AgentOutcome:
        return await run_command(self.command, task, endpoint)


def describe(outcome: AgentOutcome) -> str:
    """How an agent ended, with its error and the end of its output."""
    return "\n".join(filter(None, (f"the agent {outcome.status}", outcome.error, outcome.output)))


def task_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The task that an agent gets for a row of the data set, as plain JSON values; the messages are under `prompt`."""
    task = {name: plain(sample[name]) for name in TASK if name in sample}
    return {"prompt": task.pop("raw_prompt", None), **task}


def plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [plain(inner) for inner in value]
    return value
