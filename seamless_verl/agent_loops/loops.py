"""Agent loops that run an agent of the user's own against a session of the gateway.

Named in `actor_rollout_ref.rollout.agent.agent_loop_config_path` as verl's own are:

    - name: calculator
      _target_: seamless_verl.agent_loops.loops.CallableAgentLoop
      agent: path/to/agent.py:run
      time_limit_s: 60
    - name: shell
      _target_: seamless_verl.agent_loops.loops.CommandAgentLoop
      command: [python, agent.py]
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from seamless_verl.agent_loops.rows import SessionOutputs, outputs_of
from seamless_verl.agents.callable import call_agent, load_agent
from seamless_verl.agents.command import AgentCommand, run_command
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus
from seamless_verl.data_plane.actor import FinishedSession
from seamless_verl.data_plane.client import answered, left, opened_session, plane_of
from seamless_verl.trajectory.session import Closed

logger = logging.getLogger(__name__)
SAMPLED = ("temperature", "top_p", "top_k", "repetition_penalty")
TASK = ("raw_prompt", "data_source", "reward_model", "extra_info", "uid", "index")
SLACK_S = 30.0  # a session outlives its agent's time limit by this, so that the agent's limit is what ends it


class AgentFailedError(RuntimeError):
    """An agent ended badly, or said nothing; its group is to be replaced."""


class SessionAgentLoop(AgentLoopBase, ABC):  # type: ignore[misc]
    """One session for each run; the agent's sampling is the trainer's, whatever it asks for.

    A session whose agent failed or ran out of time is rewarded `failure_reward`; with None it fails, and
    verl replaces its group. `confirmed`: the worker that runs the loop says when the outputs are kept.
    """

    confirmed = False  # a worker of the user's own does not know of it

    def __init__(
        self, *args: Any, time_limit_s: float = 600.0, failure_reward: float | None = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.time_limit_s, self.failure_reward = time_limit_s, failure_reward

    @abstractmethod
    async def run_agent(self, task: Mapping[str, Any], endpoint: Endpoint) -> AgentOutcome:
        """Run the agent to its end, within `time_limit_s`."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        name = f"{kwargs['uid']}_{kwargs['session_id']}"  # as TransferQueue's keys begin
        plane, started = plane_of(self.config, name), time.monotonic()
        overrides = {name: sampling_params[name] for name in SAMPLED if name in sampling_params}
        opening = {
            "uid": str(kwargs["uid"]),
            "limits": {"lifetime": self.time_limit_s + SLACK_S},
            "metadata": {"session": str(kwargs["session_id"])},  # (uid, session) is TransferQueue's key
            "sampling": {"overrides": overrides, "max_tokens": self.rollout_config.response_length},
        }
        opened = await opened_session(plane, opening)
        endpoint = Endpoint(opened["anthropic_base_url"], opened["key"], opened["session_id"])
        try:
            outcome = await self.run_agent(task_of(kwargs), endpoint)
        except asyncio.CancelledError:
            await left(plane, endpoint.session_id, Closed.ABANDONED)
            raise
        except Exception:
            await left(plane, endpoint.session_id, Closed.FAILED)
            raise
        reason = Closed.FINISHED if outcome.status is AgentStatus.FINISHED else Closed.FAILED
        session = await answered(plane.close.remote(endpoint.session_id, reason))
        try:
            reward = self.reward(outcome, session)
            if not session.sequences:
                raise AgentFailedError(f"session {endpoint.session_id} left nothing to train: {told(outcome)}")
        except AgentFailedError:
            await answered(plane.handed.remote(endpoint.session_id, kept=False))
            raise
        outputs = outputs_of(session, reward, time.monotonic() - started)
        if not self.confirmed:
            await answered(plane.handed.remote(endpoint.session_id))
        return SessionOutputs(outputs, plane, endpoint.session_id)

    def reward(self, outcome: AgentOutcome, session: FinishedSession) -> float | None:
        """What the agent, or its harness, said; None leaves it to verl's reward manager."""
        if outcome.status is AgentStatus.FINISHED:
            return outcome.reward if outcome.reward is not None else session.rewards.get("reward")
        if self.failure_reward is None:
            raise AgentFailedError(told(outcome))
        logger.warning("rewarded %s: %s", self.failure_reward, told(outcome))
        return self.failure_reward


class CallableAgentLoop(SessionAgentLoop):
    """An async function `agent(task, endpoint)` in "package.module:name" or "path/file.py:name"."""

    def __init__(self, *args: Any, agent: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent = load_agent(agent, key="agent")

    async def run_agent(self, task: Mapping[str, Any], endpoint: Endpoint) -> AgentOutcome:
        return await call_agent(self.agent, task, endpoint, time_limit_s=self.time_limit_s)


class CommandAgentLoop(SessionAgentLoop):
    """A command line in a scratch folder of its own, copied from `folder`."""

    def __init__(
        self,
        *args: Any,
        command: str | Sequence[str],
        folder: str | None = None,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        line = command if isinstance(command, str) else list(command)
        self.command = AgentCommand(
            line,
            folder=None if folder is None else Path(folder),
            env=dict(env or {}),
            limits=CommandLimits(wall_s=self.time_limit_s),
        )

    async def run_agent(self, task: Mapping[str, Any], endpoint: Endpoint) -> AgentOutcome:
        return await run_command(self.command, task, endpoint)


def told(outcome: AgentOutcome) -> str:
    """How an agent ended, with the last it said of itself."""
    return "\n".join(filter(None, (f"the agent {outcome.status}", outcome.error, outcome.output)))


def task_of(sample: Mapping[str, Any]) -> dict[str, Any]:
    """What the agent is told of its prompt, as plain JSON values; the messages are under `prompt`."""
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
