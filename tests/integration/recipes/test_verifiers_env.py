"""Environments of verifiers: rollouts with scripted replies, and two steps of each of the recipe's three."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.gateway import GatewayHarness, gateway_harness
from support.paths import RECIPES
from support.recipes import train

from seamless_verl.gateway.token_requests import TOKENS_PATH

pytestmark = [pytest.mark.integration, pytest.mark.long]
RECIPE = RECIPES / "verifiers_env"
LOOKUP = RECIPE / "environments" / "lookup.toml"
STEPS, PROMPTS, SAMPLES = 2, 2, 4
PACKAGES = Path(os.environ.get("VERIFIERS") or RECIPES.parent / "runs" / "verifiers_env" / "verifiers")
FEW = (f"data.train_batch_size={PROMPTS}", f"actor_rollout_ref.rollout.n={SAMPLES}", "data.max_response_length=64")


@pytest.mark.parametrize(
    ("name", "client"), [("sums", "eval"), ("guess", "eval"), ("lookup", "eval"), ("guess", "train")]
)
def test_an_environment_is_trained_as_it_is(name: str, client: str, tmp_path: Path) -> None:
    environment = str(RECIPES / "verifiers_env" / "environments" / f"{name}.toml")
    steps = (f"trainer.total_training_steps={STEPS}", "trainer.test_freq=-1", "trainer.val_before_train=false")
    run = train(
        "verifiers_env",
        tmp_path,
        *FEW,
        *steps,
        "trainer.save_freq=-1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        ENVIRONMENT=environment,
        CLIENT=client,
        VERIFIERS=str(PACKAGES),
        TASKS="16",
        VAL="2",
        SLOTS="4",
    )
    run.check_counts(STEPS)
    scored = [record for record in run.records() if record.reason == "finished"]
    assert len(scored) >= STEPS * PROMPTS * SAMPLES
    turns = {len(record.calls) for record in scored}
    assert turns == {1} if name == "sums" else max(turns) <= 4
    assert (max(turns) > 1) == (name == "guess"), "the guessing game's user answers until the number is found"
    paths = {call.request["path"] for record in scored for call in record.calls}
    assert paths == ({TOKENS_PATH} if client == "train" else {"/v1/chat/completions"})
    tools = [call.request.get("tools") or [] for record in scored for call in record.calls]
    assert [tool["function"]["name"] for tool in tools[0]] == (["price"] if name == "lookup" else [])


LOADS = "from environment import config, load_environment, row, run\n"
DRIVER = (
    LOADS
    + """
import asyncio, json, sys
from seamless_verl.agents.callable import call_agent
from seamless_verl.agents.endpoint import Endpoint

first = row(next(iter(load_environment(config()).taskset)))
task = {"extra_info": first | json.loads(sys.argv[3])}
ended = asyncio.run(call_agent(run, task, Endpoint(sys.argv[1], sys.argv[2], "id"), time_limit_s=120))
print(json.dumps([ended.status, ended.reward, ended.reward_info, ended.error]))
"""
)
ODD = """
import verifiers.v1 as vf

class OddTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def odd(self, trace: vf.Trace) -> float:
        return {reward}

class OddTaskset(vf.Taskset[OddTask, vf.TasksetConfig]):
    def load(self):
        yield OddTask(vf.TaskData(prompt="hi"), self.config.task)

    def toolsets(self, config):
        return {tools}

__all__ = ["OddTaskset"]
"""
ROLES = '[taskset]\nid = "odd"\n[agent.harness]\nid = "null"\n[agent.runtime]\ntype = "subprocess"\n'


async def rollout(harness: GatewayHarness, environment: Path, session: dict[str, str], **more: Any) -> list[Any]:
    """How the recipe's agent ends on the environment's first task, in verifiers' packages: all that DRIVER prints."""
    changed, variables = more.pop("extra_info", {}), {"ENVIRONMENT": str(environment), **more}
    words = [session["anthropic_base_url"], session["key"], json.dumps(changed)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        made_packages() / "bin" / "python", "-c", DRIVER, *words, env=environment_of(**variables), stdout=pipe
    )
    out, _ = await process.communicate()
    return list(json.loads(out.splitlines()[-1]))


def environment_of(**variables: str) -> dict[str, str]:
    paths = os.pathsep.join(map(str, (RECIPES.parent, RECIPE)))
    return os.environ | {"PATH": f"{PACKAGES}/bin:{os.environ['PATH']}", "PYTHONPATH": paths} | variables


def made_packages() -> Path:
    subprocess.run([RECIPE / "setup.sh", PACKAGES], env=os.environ | {"PYTHON": sys.executable}, check=True)
    return PACKAGES


def odd(folder: Path, *, reward: str = "1.0", tools: str = "[]", toml: str = ROLES) -> Path:
    """An environment of one task, as it is given."""
    (folder / "odd.py").write_text(ODD.format(reward=reward, tools=tools))
    (file := folder / "odd.toml").write_text(toml)
    return file


def price(item: str) -> str:
    return f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}"}}}}</tool_call>'


async def test_a_tool_answers_in_a_rollout_of_several_turns(nano: Path) -> None:
    async with gateway_harness(nano) as harness:
        harness.set_replies(price("tea"), price("rice"), "3 5 6 7 8 9")
        status, reward, metrics, error = await rollout(harness, LOOKUP, harness.session)
        assert (status, reward, metrics) == ("finished", 1.0, {"looked_up": 2.0}), error
        assert len(harness.source.calls) == 3
        answers = [f"<tool_response>{answer}</tool_response>" for answer in (3, 5)]
        assert [harness.prompt(-1).count(answer) for answer in answers] == [1, 1]
        assert [harness.prompt(-2).count(answer) for answer in answers] == [1, 0]


@pytest.mark.parametrize(
    ("options", "limits"), [((), {"max_turns": 2}), (("--max-model-len", "399"), {})], ids=["turns", "context"]
)
async def test_a_rollout_that_runs_into_a_limit_is_scored(
    options: tuple[str, ...], limits: dict[str, int], nano: Path
) -> None:
    async with gateway_harness(nano, options) as harness:
        harness.set_replies(price("tea"), price("rice"))
        session = await harness.open(limits=limits)
        status, reward, metrics, error = await rollout(harness, LOOKUP, session)
        assert (status, reward, metrics) == ("finished", 0.0, {"looked_up": 1.0}), error
        assert len(harness.source.calls) == 2


@pytest.mark.parametrize(
    ("made", "more", "status", "says"),
    [
        ({"reward": "1 / 0"}, {}, "tool_failed", "ZeroDivisionError"),
        ({"reward": "float('nan')"}, {}, "invalid_reward", "nan"),
        ({"tools": "1 / 0"}, {}, "tool_failed", "cannot be served"),
        ({}, {"extra_info": {"key": "another"}}, "tool_failed", "is not that of the data"),
        ({}, {"UV_INDEX_URL": "http://127.0.0.1:9", "UV_HTTP_RETRIES": "0"}, "tool_failed", "uv script"),
    ],
)
async def test_what_the_environment_fails_in_is_no_answer(
    made: dict[str, str], more: dict[str, Any], status: str, says: str, nano: Path, tmp_path: Path
) -> None:
    if "UV_INDEX_URL" in more:
        more = more | {"UV_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    async with gateway_harness(nano) as harness:
        ended, reward, _, error = await rollout(harness, odd(tmp_path, **made), harness.session, **more)
        assert (ended, reward) == (status, None), error
        assert says in error


@pytest.mark.parametrize(
    ("made", "tasks", "says"),
    [
        ({}, "abc", "TASKS='abc'"),
        ({"toml": "[taskset"}, "2", "is no environment of verifiers: TOMLDecodeError"),
        ({"toml": ROLES.replace('"odd"', '"missing"')}, "2", "install its package"),
        ({"toml": ROLES[: ROLES.index("[agent.runtime]")]}, "2", "under [agent.runtime]"),
        ({"reward": "1.0\n\n    def __init__(self, *given):\n        raise OSError('no network')"}, "2", "no network"),
    ],
)
def test_environments_are_refused_before_the_run(made: dict[str, str], tasks: str, says: str, tmp_path: Path) -> None:
    words = [made_packages() / "bin" / "python", RECIPE / "environment.py", tasks]
    env = environment_of(ENVIRONMENT=str(odd(tmp_path, **made)))
    run = subprocess.run(words, env=env, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 2 and says in run.stderr and "Traceback" not in run.stderr, run.stderr
