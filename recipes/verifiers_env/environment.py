"""An environment of verifiers as an agent of runners, unchanged: its rollouts call the session that a task comes with.

ENVIRONMENT=environments/sums.toml python environment.py COUNT    # that many of its tasks, a line of JSON each
seamless-verl runner --agent verifiers=environment.py:run ...      # does a run's tasks
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1 import errors
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes import runtime_is_local
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from seamless_verl.agents.failures import ToolFailedError
from seamless_verl.errors import ConfigError, exits_on_config_error

FILE = Path(os.environ.get("ENVIRONMENT") or Path(__file__).parent / "environments" / "sums.toml")
RENEW = 256  # rollouts; until its environment is served anew, verifiers keeps an HTTP client for each session's address
FOLDER = str(FILE.resolve().parent)  # where an environment may stand that is no package; tool servers look there, too
sys.path.insert(0, FOLDER)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (FOLDER, os.environ.get("PYTHONPATH"))))
CLIENT, MODEL = os.environ.get("CLIENT", "eval"), os.environ.get("MODEL")
if CLIENT not in ("eval", "train") or (CLIENT == "train" and not MODEL):
    sys.exit(f"CLIENT={CLIENT!r}, MODEL={MODEL!r}: set CLIENT to eval, or to train with MODEL the folder of the model")
QUOTA = 403  # the gateway's status of a call for which a session has no turns or tokens left


@cache
def config() -> vf.EnvConfig:
    """The environment's; raises ConfigError for one that cannot work here."""
    try:
        given = tomllib.loads(FILE.read_text(encoding="utf-8"))
        found = resolve_env_config(given)
    except Exception as error:  # also of the environment's own module
        reason = f"is no environment of verifiers: {type(error).__name__}: {error}"
        way_out = "Correct it, or install its package: recipes/verifiers_env/setup.sh FOLDER PACKAGE"
        raise ConfigError("ENVIRONMENT", str(FILE), reason, way_out) from error
    for role, agent in agent_config_fields(found).items():
        if "runtime" not in given.get(role, {}) and not runtime_is_local(agent.runtime):
            reason = f"the agent {role} has no runtime, and verifiers' default is {agent.runtime.type}, a cloud's"
            raise ConfigError("ENVIRONMENT", str(FILE), reason, f'Write type = "subprocess" under [{role}.runtime]')
    return found


class Served:
    """The environment with its tool servers and its proxy of calls, while a rollout needs them."""

    def __init__(self) -> None:
        self.begun = self.running = 0
        self.ready: asyncio.Future[vf.Env] = asyncio.get_running_loop().create_future()
        self.unused = asyncio.Event()
        self.task = asyncio.create_task(self.serve())

    async def serve(self) -> None:
        try:
            environment = load_environment(config())
            async with environment.serving():
                self.ready.set_result(environment)
                await self.unused.wait()
        except BaseException as error:  # verifiers ends the process where a service wants a login
            if self.ready.done():
                raise
            self.ready.set_exception(ToolFailedError(f"{FILE}: the environment cannot be served: {error!r}"))

    @asynccontextmanager
    async def used(self) -> AsyncIterator[vf.Env]:
        self.begun, self.running = self.begun + 1, self.running + 1
        try:
            yield await asyncio.shield(self.ready)
        finally:
            self.running -= 1
            if self.begun >= RENEW and not self.running:
                self.unused.set()


served: list[Served] = []  # the one that new rollouts use
tasks: dict[int, vf.Task] = {}  # by their places in the taskset
rest: list[Iterator[vf.Task]] = []  # of the taskset: those not read yet


async def run(task: Mapping[str, Any], endpoint: Any) -> dict[str, float]:
    """A rollout: the reward and the metrics of the agents that train.

    A rollout that failed raises what failed in it, as verifiers names it, and has no reward.
    """
    if not served or served[-1].begun >= RENEW or served[-1].task.done():
        served[:] = [Served()]
    async with served[-1].used() as environment:
        chosen = task_of(environment, task["extra_info"])
        context = vf.ModelContext("policy", client_of(endpoint), vf.SamplingConfig())
        episode = await environment.run_episode(chosen, context, on_trace=partial(end_at_quota, context.client))
    if not environment.complete(episode):
        failed = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        raise as_exception(failed[-1] if failed else None)
    return outcome([trace for trace in episode.traces if trace.agent.trainable])


def end_at_quota(client: Any, trace: vf.Trace) -> None:
    """Ends a rollout as verifiers' own limits do, so that it is scored, where the gateway's refuse a call."""
    if trace.agent is None or trace.agent.config.client != client:
        return  # as a judge's with a client of its own

    def changed(trace: vf.Trace) -> None:
        if trace.calls and (error := trace.calls[-1].error) is not None and error.status_code == QUOTA:
            trace.stop("quota_exceeded")

    trace.watch(changed)


def client_of(endpoint: Any) -> vf.EvalClientConfig | vf.TrainClientConfig:
    """The client that CLIENT names; the address has the key."""
    address = {"base_url": f"{endpoint.base_url}/v1", "api_key_var": ""}
    if CLIENT == "eval":
        return vf.EvalClientConfig(**address)
    return vf.TrainClientConfig(**address, renderer_model_name=MODEL)


def task_of(environment: vf.Env, extra_info: Mapping[str, Any]) -> vf.Task:
    """The task of a row; raises ToolFailedError if it is another one here than where the data was made."""
    rest[:] = rest or [iter(environment.taskset)]
    while extra_info["index"] not in tasks and (following := next(rest[0], None)) is not None:
        tasks[following.data.idx] = following
    chosen = tasks.get(extra_info["index"])
    if chosen is None or chosen.key != extra_info["key"]:
        raise ToolFailedError(f"{FILE}: task {extra_info['index']} is not that of the data: make the data again")
    return chosen


def as_exception(error: vf.Error | None) -> Exception:
    """What verifiers recorded, as the exception that it was."""
    if error is None:
        return errors.EnvError("the rollout is not complete")
    kind = getattr(errors, error.type, None)
    if kind is errors.ProviderError:
        return errors.ProviderError(error.message, status_code=error.status_code or 502)
    if kind is errors.HarnessError and error.message.startswith(("harness setup", "opening harness session")):
        return ToolFailedError(error.message)  # as where uv cannot fetch the chat loop
    if error.type == "TimeoutError":
        return TimeoutError(error.message)
    return kind(error.message) if kind is not None else errors.EnvError(f"{error.type}: {error.message}")


def outcome(traces: list[vf.Trace]) -> dict[str, float]:
    """The mean over the agents that train, of the reward and of each metric that all of them have."""
    if not traces:
        raise ToolFailedError(f"{FILE}: no agent of the environment is trainable")
    shared = set.intersection(*(set(trace.metrics) for trace in traces))
    means = {name: sum(float(trace.metrics[name]) for trace in traces) / len(traces) for name in sorted(shared)}
    return {**means, "reward": sum(trace.reward for trace in traces) / len(traces)}


def row(task: vf.Task) -> dict[str, Any]:
    """What the trainer needs of a task: its prompt, for the length, and its place. The environment has the rest."""
    data = task.data.model_dump(mode="json")
    messages = data["prompt"] if isinstance(data["prompt"], list) else []
    if isinstance(data["prompt"], str):
        messages = [{"role": "user", "content": data["prompt"]}]
    if data["system_prompt"]:
        messages = [{"role": "system", "content": data["system_prompt"]}, *messages]
    return {"prompt": messages or [{"role": "user", "content": ""}], "index": data["idx"], "key": task.key}


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    given = sys.argv[1]
    if not given.isdecimal():
        raise ConfigError("TASKS", given, "is no number of tasks", "Set it to 2 or more")
    loaded = config()
    try:
        for one in itertools.islice(load_environment(loaded).taskset, int(given)):
            sys.stdout.write(json.dumps(row(one)) + "\n")
    except Exception as error:  # the environment's own code
        reason = f"its tasks cannot be loaded: {type(error).__name__}: {error}"
        way_out = "Correct it; what it downloads takes HF_HUB_OFFLINE=0, or to be downloaded before"
        raise ConfigError("ENVIRONMENT", str(FILE), reason, way_out) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
config()  # a runner that cannot serve it does not start
