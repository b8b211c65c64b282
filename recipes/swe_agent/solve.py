"""The harness: runs mini-swe-agent on a copy of a repository, and rewards it by tests that it has not seen.

`run` is named in agents.yaml. The agent is a command in a scratch folder with limits. When all its processes are gone,
the sources it left are put into a second folder, beside tests that come from the data. So neither changed tests nor a
reward that the agent wrote count. None of this is a sandbox: the agent has this user's rights.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seamless_verl.agents.command import AgentCommand, run_command
from seamless_verl.agents.endpoint import Endpoint
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.agents.outcome import AgentOutcome, AgentStatus
from seamless_verl.errors import ConfigError

HERE = Path(__file__).resolve().parent
AGENT_S, JUDGE_S, COLLECT_S = 240.0, 30.0, 15.0
"""Seconds for the agent, for the tests, and to collect the sources; the limit in agents.yaml covers all three."""

READABLE_SHARE = 0.1
"""The share of a beginner's reward for readable replies; the rest is for tests."""

MEMORY, FILE = 4 << 30, 64 << 20  # bytes, of each process and each file
NO_ENDPOINT = Endpoint("http://127.0.0.1:9", "none", "none")  # the tests call no model
LOG = "../trajectory.json"  # beside the repository's copy
SETTINGS = {
    "MSWEA_CONFIGURED": "true",  # no questions at the first start
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would be downloaded
}


@dataclass(frozen=True)
class Solved:
    """How one run ended: the tests' share in [0, 1], the agent's replies, its own exit code, what it printed."""

    share: float
    replies: Sequence[str]
    exit_code: int | None
    output: str


async def run(task: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The reward is the share of the tests that pass, 1.0 for all."""
    solved = await solve(task, endpoint, ["mini.yaml"])
    return {"reward": solved.share, "exit_code": solved.exit_code}


async def run_beginner(task: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """As `run`, with short replies and a partial reward for a model that cannot write yet."""
    solved = await solve(task, endpoint, ["mini.yaml", "beginner.yaml"])
    reward = (1 - READABLE_SHARE) * solved.share + READABLE_SHARE * readable(solved.replies)
    return {"reward": reward, "exit_code": solved.exit_code}


async def solve(task: Mapping[str, Any], endpoint: Endpoint, settings: Sequence[str]) -> Solved:
    """Run the agent with these settings files of this folder; raises RuntimeError when it, or its judging, failed."""
    info, python = task["extra_info"], interpreter()
    issue = {"issue": task["prompt"][-1]["content"]}
    limits = CommandLimits(wall_s=AGENT_S + COLLECT_S, address_space_bytes=MEMORY, file_bytes=FILE)
    outcome = await run_command(agent(python, Path(info["repository"]), settings, limits), issue, endpoint)
    result = finished(outcome, "the agent")
    share = await passing_share(python, Path(info["tests"]), result["files"])
    return Solved(share, result["replies"], result["exit_code"], outcome.output)


def agent(python: Path, repository: Path, settings: Sequence[str], limits: CommandLimits) -> AgentCommand:
    """`mini` from the agents' environment, which is first on its PATH too."""
    mini = [str(python.with_name("mini")), *(word for name in settings for word in ("-c", str(HERE / name)))]
    collect = [str(python), "-I", str(HERE / "collect.py"), f"{AGENT_S:g}", LOG]
    line = [*map(escape_braces, [*collect, *mini]), "-o", LOG, "-t", "{issue}"]
    path = {"PATH": f"{python.parent}:{os.environ.get('PATH', os.defpath)}"}
    return AgentCommand(line, folder=repository, env=SETTINGS | path, limits=limits)


async def passing_share(python: Path, tests: Path, files: Mapping[str, str]) -> float:
    """The share of the tests that pass; 0 when they did not finish, as with sources that end the process."""
    secret = secrets.token_hex()
    limits = CommandLimits(wall_s=JUDGE_S, cpu_s=int(JUDGE_S), address_space_bytes=MEMORY, file_bytes=FILE)
    judge = AgentCommand(
        [escape_braces(str(python)), "-I", escape_braces(str(HERE / "judge.py"))], folder=tests, limits=limits
    )
    outcome = await run_command(judge, {"files": dict(files), "secret": secret}, NO_ENDPOINT)
    trusted = outcome.reward is not None and outcome.reward_info.get("secret") == secret
    return outcome.reward if trusted and outcome.reward is not None else 0.0


def finished(outcome: AgentOutcome, who: str) -> dict[str, Any]:
    if outcome.status is not AgentStatus.FINISHED or "files" not in outcome.reward_info:
        raise RuntimeError(f"{who} {outcome.status}: {outcome.error}\n{outcome.output}")
    return outcome.reward_info


def interpreter() -> Path:
    """Python in the agents' environment; raises ConfigError where it was not made."""
    folder = os.environ.get("AGENT_ENV")
    if not folder or not Path(folder, "bin", "mini").is_file():
        raise ConfigError("AGENT_ENV", folder, "no mini-swe-agent is there", "Run recipes/swe_agent/setup.sh FOLDER")
    return Path(folder).absolute() / "bin" / "python"


def readable(replies: Sequence[str]) -> float:
    """The share of printable ASCII and line ends in all replies; 0 without replies."""
    text = "".join(replies)
    return sum(" " <= character <= "~" or character == "\n" for character in text) / max(1, len(text))


def escape_braces(word: str) -> str:
    """The word as an argument of a command in which `{field}` stands for a value."""
    return word.replace("{", "{{").replace("}", "}}")
