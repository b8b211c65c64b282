"""The harness: mini-swe-agent on a copy of a repository, and a reward from tests it has never seen.

`run` is named in agents.yaml. The agent is a command in a scratch folder with limits. When all its processes are
gone, the sources it left are put into a second folder, beside tests that come from the data; so neither
changed tests nor a reward of the agent's own making count. None of this is a sandbox: the agent has this
user's rights.
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
AGENT_S, JUDGE_S, LAST_S = 240.0, 30.0, 15.0
"""Seconds for the agent, for the tests, and for handing in; agents.yaml has room for all three."""

MANNERS = 0.1
"""A beginner's reward has so much for readable replies, and the rest for tests."""

MEMORY, FILE = 4 << 30, 64 << 20  # bytes, of each process and each file
NOWHERE = Endpoint("http://127.0.0.1:9", "none", "none")  # the tests have no session to talk to
LOG = "../trajectory.json"  # beside the repository's copy
QUIET = {
    "MSWEA_CONFIGURED": "true",  # no questions at the first start
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would be downloaded
}


@dataclass(frozen=True)
class Solved:
    """How one run ended: the tests' share in [0, 1], the agent's replies, its own exit code, what it printed."""

    share: float
    said: Sequence[str]
    exit_code: int | None
    output: str


async def run(task: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """The reward is the share of the tests that pass, 1.0 for all."""
    solved = await solve(task, endpoint, ["mini.yaml"])
    return {"reward": solved.share, "exit_code": solved.exit_code}


async def run_beginner(task: Mapping[str, Any], endpoint: Endpoint) -> dict[str, Any]:
    """As `run`, with short replies and something to learn for a model that cannot write yet."""
    solved = await solve(task, endpoint, ["mini.yaml", "beginner.yaml"])
    reward = (1 - MANNERS) * solved.share + MANNERS * readable(solved.said)
    return {"reward": reward, "exit_code": solved.exit_code}


async def solve(task: Mapping[str, Any], endpoint: Endpoint, settings: Sequence[str]) -> Solved:
    """Run the agent with these settings of this folder. RuntimeError when it, or its judging, did not end well."""
    info, python = task["extra_info"], interpreter()
    issue = {"issue": task["prompt"][-1]["content"]}
    limits = CommandLimits(wall_s=AGENT_S + LAST_S, address_space_bytes=MEMORY, file_bytes=FILE)
    done = await run_command(agent(python, Path(info["repository"]), settings, limits), issue, endpoint)
    given = finished(done, "the agent")
    share = await judged(python, Path(info["tests"]), given["files"])
    return Solved(share, given["said"], given["exit_code"], done.output)


def agent(python: Path, repository: Path, settings: Sequence[str], limits: CommandLimits) -> AgentCommand:
    """`mini` from the agents' environment, which is first on its PATH too."""
    mini = [str(python.with_name("mini")), *(word for name in settings for word in ("-c", str(HERE / name)))]
    collect = [str(python), "-I", str(HERE / "collect.py"), f"{AGENT_S:g}", LOG]
    line = [*map(literal, [*collect, *mini]), "-o", LOG, "-t", "{issue}"]
    path = {"PATH": f"{python.parent}:{os.environ.get('PATH', os.defpath)}"}
    return AgentCommand(line, folder=repository, env=QUIET | path, limits=limits)


async def judged(python: Path, tests: Path, files: Mapping[str, str]) -> float:
    """The share of the tests that pass; 0 when they came to no end, as with sources that end the process."""
    word = secrets.token_hex()
    limits = CommandLimits(wall_s=JUDGE_S, cpu_s=int(JUDGE_S), address_space_bytes=MEMORY, file_bytes=FILE)
    judge = AgentCommand([literal(str(python)), "-I", literal(str(HERE / "judge.py"))], folder=tests, limits=limits)
    outcome = await run_command(judge, {"files": dict(files), "word": word}, NOWHERE)
    believed = outcome.reward is not None and outcome.reward_info.get("word") == word
    return outcome.reward if believed and outcome.reward is not None else 0.0


def finished(outcome: AgentOutcome, who: str) -> dict[str, Any]:
    if outcome.status is not AgentStatus.FINISHED or "files" not in outcome.reward_info:
        raise RuntimeError(f"{who} {outcome.status}: {outcome.error}\n{outcome.output}")
    return outcome.reward_info


def interpreter() -> Path:
    """Python in the agents' environment; ConfigError where it is not made."""
    where = os.environ.get("AGENT_ENV")
    if not where or not Path(where, "bin", "mini").is_file():
        raise ConfigError("AGENT_ENV", where, "no mini-swe-agent is there", "Run recipes/swe_agent/setup.sh FOLDER")
    return Path(where).absolute() / "bin" / "python"


def readable(replies: Sequence[str]) -> float:
    """The share of printable ASCII and line ends in all replies; 0 where nothing was said."""
    text = "".join(replies)
    return sum(" " <= character <= "~" or character == "\n" for character in text) / max(1, len(text))


def literal(word: str) -> str:
    """The word as an argument of a command in which `{field}` stands for a value."""
    return word.replace("{", "{{").replace("}", "}}")
