"""Runs an agent's command on tasks in Harbor's layout, for a run: the verifier's verdict is the reward.

AGENT='claude --print -- {question} </dev/null' python trial.py --admin-file FILE --slots 8
with the options of `seamless-verl runner`. AGENT is any command line; without it agent.py is what runs.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harbor_task import HarborTask, read_task
from sandbox import HERE, Container, Inside, Plain, limits, sandbox_of

from seamless_verl.agents.command import run_command
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.failures import ToolFailedError
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus
from seamless_verl.agents.own_time import PausedSeconds
from seamless_verl.agents.scratch import parse_reward
from seamless_verl.cli import runner
from seamless_verl.client.runner import TaskRefusedError
from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.runtime.scores import score_of

MINE = shlex.join([str(Path(sys.prefix, "bin", "python")), str(HERE / "agent.py")])
AGENT = os.environ.get("AGENT") or f"{MINE} {{question}}"
NOBODY = Endpoint("http://127.0.0.1:9", "none", "none")  # a verifier calls no session
NOT_STARTED = {126, 127}  # exit codes of shells
ENDED = {AgentStatus.FINISHED, AgentStatus.INVALID_REWARD}  # a reward.json of the agent's is nobody's


async def run(row: Mapping[str, Any], endpoint: Endpoint, limit_s: float, paused: PausedSeconds) -> AgentOutcome:
    """The agent's command within its time, then the verifier, also of one that was out of time or failed."""
    try:
        task = read_task(Path(row["extra_info"]["folder"]))
        async with sandbox_of(task) as sandbox:
            own_s = min(task.agent_s or limit_s, limit_s - task.verifier_s)
            ended = await run_command(
                agent_in(sandbox).limited(own_s), {"prompt": task.instruction}, endpoint, paused=paused
            )
            if ended.exit_code in NOT_STARTED:
                return replace(ended, status=AgentStatus.TOOL_FAILED, error=f"no agent: {ended.output[-500:]}")
            if ended.status is AgentStatus.TOOL_FAILED:
                return ended
            reward, more = await verdict(task, sandbox)
    except ConfigError as error:  # it may run where there are containers
        raise TaskRefusedError(str(error)) from error
    except (ToolFailedError, OSError) as error:
        return AgentOutcome(AgentStatus.TOOL_FAILED, error=f"{type(error).__name__}: {error}")
    if ended.status in ENDED:
        return replace(ended, status=AgentStatus.FINISHED, error="", reward=reward, reward_info=more)
    try:
        await post(endpoint, reward)
    except httpx.HTTPError as error:  # 409: the agent, which has the session's key, gave it a reward of its own
        return AgentOutcome(AgentStatus.TOOL_FAILED, error=f"the verdict was not taken: {error}")
    return ended


def agent_in(sandbox: Plain | Container) -> Inside:
    """Raises ConfigError for an AGENT, or variables of a task, that cannot be meant."""
    return Inside(AGENT, env=sandbox.env, limits=limits(), sandbox=sandbox)


async def post(endpoint: Endpoint, reward: float) -> None:
    """Gives the session its reward, which counts if the gateway's limits or `on_timeout` say so."""
    transport = httpx.AsyncHTTPTransport(retries=5)  # a data plane may be started again meanwhile
    async with httpx.AsyncClient(trust_env=False, transport=transport, timeout=60) as client:
        key = {"Authorization": f"Bearer {endpoint.session_key}"}
        (await client.post(endpoint.reward_url, json={"reward": reward}, headers=key)).raise_for_status()


async def verdict(task: HarborTask, sandbox: Plain | Container) -> tuple[float, dict[str, Any]]:
    """What tests/test.sh wrote to /logs/verifier; raises ToolFailedError where it gave no number."""
    await sandbox.add_tests()
    env = sandbox.env | task.verifier_env
    command = Inside("/tests/test.sh", env=env, limits=limits(), sandbox=sandbox).limited(task.verifier_s)
    ended = await run_command(command, {}, NOBODY)
    if ended.status in (AgentStatus.TIMED_OUT, AgentStatus.OUTPUT_LIMIT, AgentStatus.TOOL_FAILED):
        raise ToolFailedError(f"{task.folder.name}: its verifier: {ended.error}: {ended.output[-500:]}")
    try:
        if (text := await sandbox.read("/logs/verifier/reward.json")) is not None:
            reward, more = parse_reward(text)
            if reward is not None:
                return reward, more
        elif (text := await sandbox.read("/logs/verifier/reward.txt")) is not None:
            return score_of(float(text)), {}
    except ValueError as error:
        raise ToolFailedError(f"{task.folder.name}: its verifier's reward: {error}") from error
    raise ToolFailedError(f"{task.folder.name}: no reward by its verifier, {ended.error}: {ended.output[-500:]}")


@exits_on_config_error
def main() -> int:
    """Exit code 2 with one line on standard error for an option that cannot work."""
    commands = (parser := argparse.ArgumentParser()).add_subparsers()
    runner.add_command(commands)
    args = parser.parse_args(["runner", *sys.argv[1:]])
    if args.slots < 1:
        raise ConfigError("--slots", args.slots, "must be at least 1", "Set SLOTS to the number of sandboxes at a time")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    asyncio.run(runner.work(*runner.place_of(args), {"harbor": run}, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
