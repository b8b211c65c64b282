"""A runner with the run that it works for: results, refusals, lost leases, and its stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.paths import ROOT
from support.rollout import until
from support.runner_plane import RUNNER_KEY, finish, order, runner_plane, submitted

from seamless_verl.agents.command import AgentCommand
from seamless_verl.agents.failures import LimitReachedError, ToolFailedError
from seamless_verl.client.connection import RunConnection
from seamless_verl.client.runner import Runner, TaskRefusedError, command_agent, function_agent
from seamless_verl.errors import OutsideApiError

pytestmark = pytest.mark.integration


def connection(plane: Any, key: str = RUNNER_KEY) -> RunConnection:
    return RunConnection(plane.sessions.gateway.url, key, runner="r")


async def test_functions_and_commands_run_on_tasks(nano: Path, tmp_path: Path) -> None:
    def blocking(task: Any, endpoint: Any) -> float:
        if task["number"] == 1:
            raise TaskRefusedError("not here")
        return 0.5

    call = (
        "import json, os, urllib.request as u; url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'; "
        "body = json.dumps({'model': os.environ['OPENAI_MODEL'], 'max_tokens': 4, 'messages': "
        "json.load(open('task.json'))['prompt']}).encode(); "
        "u.urlopen(u.Request(url, body, {'content-type': 'application/json'})).read(); "
        "json.dump({'reward': 0.25}, open('reward.json', 'w'))"
    )
    command = AgentCommand([sys.executable, "-c", call.replace("{", "{{").replace("}", "}}")])
    agents = {"function": function_agent(blocking), "command": command_agent(command)}
    async with asyncio.timeout(200), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        orders = [order(0, agent="function"), order(1, agent="function", max_attempts=1), order(2, agent="command")]
        running = await submitted(plane, *orders)
        async with connection(plane) as connected:
            await Runner(connected, agents, slots=2).run(max_tasks=3)
        first, refused, third = [await task for task in running]
        assert first.outcome["reward"] == 0.5
        assert refused.state == "lost" and "not here" in refused.error
        assert third.outcome["reward"] == 0.25, third
        assert (await finish(plane, third)).turns == 1


async def test_what_json_does_not_have_is_reported_in_its_own_form_and_the_runner_goes_on(
    nano: Path, tmp_path: Path
) -> None:
    def agent(task: Any, endpoint: Any) -> dict[str, Any]:
        if task["number"] == 0:
            return {"reward": np.float64(0.5), "found": np.bool_(True), "text": "\ud800", "where": Path("a")}
        return {"reward": 1.0, "much": "x" * (33 << 20)}

    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        running = await submitted(plane, order(0), order(1), order(2))
        async with connection(plane) as connected:
            runner = Runner(connected, {"default": function_agent(agent)})
            await runner.run(max_tasks=3)
        assert runner.done == 3
        odd, large, _ = [(await task).outcome for task in running]
        assert (odd["status"], odd["reward"]) == ("finished", 0.5)
        assert odd["reward_info"]["found"] is True and odd["reward_info"]["text"] == "?"
        assert odd["reward_info"]["where"] == "PosixPath('a')"
        assert large["status"] == "failed" and "413 request_too_large" in large["error"]


async def test_how_an_agent_ended_is_reported_as_it_says_itself(nano: Path, tmp_path: Path) -> None:
    """A function by what it raises, a command by its exit code."""

    def agent(task: Any, endpoint: Any) -> float:
        raise (ToolFailedError("no docker"), LimitReachedError("30 turns"))[task["number"]]

    command = AgentCommand("exit 75")
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        running = await submitted(plane, order(0), order(1), order(2, agent="shell"))
        async with connection(plane) as connected:
            runner = Runner(connected, {"default": function_agent(agent), "shell": command_agent(command)})
            await runner.run(max_tasks=3)
        statuses = [(await task).outcome["status"] for task in running]
        assert statuses == ["tool_failed", "limit_reached", "tool_failed"]


async def test_an_agent_whose_lease_is_lost_is_cancelled_and_its_result_is_not_taken(
    nano: Path, tmp_path: Path
) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(task: Any, endpoint: Any) -> float:
        begun.set()
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        (running,) = await submitted(plane, order(lease_s=1.0))
        async with connection(plane) as connected:
            work = asyncio.create_task(Runner(connected, {"default": function_agent(endless)}).run())
            await begun.wait()
            running.cancel()  # the run no longer wants the task
            await cancelled.wait()
            work.cancel()
            await asyncio.wait({work, running})  # a withdrawal ends when it is on record
        assert running.cancelled() and not list(plane.runner_tasks.leases)


async def test_a_runner_with_a_wrong_key_ends_with_the_reason(nano: Path, tmp_path: Path) -> None:
    async with (
        asyncio.timeout(120),
        runner_plane(nano, tmp_path / "journal.sqlite") as plane,
        connection(plane, "a guess") as connected,
    ):
        with pytest.raises(OutsideApiError, match="401 invalid_api_key: This is not the runner key"):
            await Runner(connected, {"default": function_agent(print)}).run()


async def test_a_runner_that_is_stopped_gives_its_task_back(nano: Path, tmp_path: Path) -> None:
    async with asyncio.timeout(120), runner_plane(nano, tmp_path / "journal.sqlite") as plane:
        (running,) = await submitted(plane, order(lease_s=600.0, max_attempts=1))
        arguments = ["--connect", plane.sessions.gateway.url, "--command", "sleep 600"]  # type: ignore[union-attr]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "seamless_verl.cli", "runner", *arguments),
            env=os.environ | {"SEAMLESS_RUNNER_KEY": RUNNER_KEY, "PYTHONPATH": str(ROOT)},
            stderr=asyncio.subprocess.PIPE,
        )
        await until(lambda: plane.runner_tasks.leases.metrics()["runner_tasks/leased"] == 1)
        process.send_signal(signal.SIGTERM)
        _, errors = await process.communicate()
        assert process.returncode == 0, errors
        # Long before its lease of 600 s ends, also where the signal came before the runner had read of its lease.
        await until(lambda: plane.runner_tasks.leases.metrics()["runner_tasks/queued"] == 1)
        running.cancel()
        await asyncio.wait({running})
