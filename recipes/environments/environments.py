"""Environments with reset and step as agents of runners: a reply is an action, the sum of an episode's rewards its own.

seamless-verl runner --agent environment=environments.py:gymnasium     # GYM_ENV, GYM_KWARGS
seamless-verl runner --agent environment=environments.py:openenv       # OPENENV_URL, OPENENV_FIELD
KIND=gymnasium python environments.py     # begins one, so that what cannot work is refused before the run
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import openai

from seamless_verl.agents.failures import ToolFailedError
from seamless_verl.errors import ConfigError, exits_on_config_error

PROMPT = os.environ.get("PROMPT", "")  # said before the first observation, as the rules are
USED_UP = {"context_length_exceeded", "quota_exceeded"}  # what an episode has no room for does not count against it
Step = Callable[[Any], Awaitable[tuple[str, float, bool]]]


class NoActionError(Exception):
    """A reply that is no action: the model is told, and the environment makes no step."""


@contextmanager
def of_tool() -> Iterator[None]:
    """What an environment raises is a tool's failure: its session is dropped, and never counts as 0."""
    try:
        yield
    except NoActionError:
        raise
    except Exception as error:
        raise ToolFailedError(f"the environment: {type(error).__name__}: {error}") from error


def turns() -> int:
    given = os.environ.get("TURNS", "16")
    if not given.isdecimal() or not int(given):
        raise ConfigError("TURNS", given, "is no number of replies", "Set it to 1 or more")
    return int(given)


async def play(endpoint: Any, observation: str, step: Step) -> float:
    """The sum of the rewards of one episode; `step` takes a reply, and returns observation, reward and end."""
    messages: list[Any] = [{"role": "user", "content": f"{PROMPT}\n{observation}".strip()}]
    base_url, total, ended = f"{endpoint.base_url}/v1", 0.0, False
    async with openai.AsyncOpenAI(base_url=base_url, api_key=endpoint.session_key, timeout=3600) as client:
        for _ in range(turns()):
            try:
                reply = await client.chat.completions.create(model="policy", messages=messages)
            except (openai.BadRequestError, openai.PermissionDeniedError) as error:
                if error.code not in USED_UP:
                    raise
                break
            text = reply.choices[0].message.content or ""
            try:
                with of_tool():
                    observation, reward, ended = await step(text)
                total += reward
            except NoActionError as error:
                observation = str(error)
            if ended:
                break
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]
    return total


def made() -> tuple[Any, bool]:
    """The environment of GYM_ENV, and whether it renders as text."""
    name, given = os.environ["GYM_ENV"], os.environ.get("GYM_KWARGS", "{}")
    try:
        import gymnasium as gym

        asked = gym.make(name, **(options := json.loads(given)))
        texts = "ansi" in asked.metadata.get("render_modes", [])
        asked.close()
        return gym.make(name, **({"render_mode": "ansi"} if texts else {}), **options), texts
    except Exception as error:  # also of the environment's own package
        reason = f"cannot be made with GYM_KWARGS={given!r}: {type(error).__name__}: {error}"
        way_out = "Name an id that gymnasium knows, or package:Name-v0, and its arguments as a JSON object"
        raise ConfigError("GYM_ENV", name, reason, way_out) from error


async def gymnasium(task: Mapping[str, Any], endpoint: Any) -> float:
    """An environment of gymnasium by its id; what it renders as text is what the model sees, else the observation."""
    import gymnasium as gym

    with of_tool():
        environment, texts = made()
    space = environment.action_space

    def action_of(text: str) -> Any:
        if isinstance(space, gym.spaces.Text):
            return text
        found = re.findall(r"-?\d+", text)
        return int(found[-1]) if found and isinstance(space, gym.spaces.Discrete) else json.loads(text)

    async def step(text: str) -> tuple[str, float, bool]:
        try:
            known = space.contains(action := action_of(text))
        except (ValueError, OverflowError, RecursionError):
            known = False
        if not known:
            raise NoActionError(f"This is no action of {space}.")
        seen, reward, terminated, truncated, _ = environment.step(action)
        return environment.render() if texts else str(seen), float(reward), terminated or truncated

    try:
        with of_tool():
            seen, _ = environment.reset(seed=task["extra_info"]["index"])
        return await play(endpoint, environment.render() if texts else str(seen), step)
    finally:
        environment.close()


async def connected() -> Any:
    """A client of OpenEnv's server at OPENENV_URL."""
    url = os.environ.get("OPENENV_URL")
    try:
        from openenv.core.generic_client import GenericEnvClient

        client = GenericEnvClient(base_url=url)
        await client.connect()
    except Exception as error:
        reason = f"cannot be reached: {type(error).__name__}: {error}"
        way_out = "Set it to the address of a server of OpenEnv that runs, such as http://127.0.0.1:8000"
        raise ConfigError("OPENENV_URL", url, reason, way_out) from error
    return client


async def openenv(task: Mapping[str, Any], endpoint: Any) -> float:
    """OpenEnv's server at OPENENV_URL; a reply is the field OPENENV_FIELD of an action, else the action as JSON."""
    field = os.environ.get("OPENENV_FIELD")
    with of_tool():
        client = await connected()

    async def step(text: str) -> tuple[str, float, bool]:
        try:
            if not isinstance(action := {field: text} if field else json.loads(text), dict):
                raise ValueError(f"{action} is no object")
        except (ValueError, RecursionError) as error:
            raise NoActionError(f"This is no action: {error}") from error
        try:
            result = await client.step(action)
        except RuntimeError as error:  # the server says so of an action that it does not take
            if "VALIDATION_ERROR" not in str(error):
                raise
            raise NoActionError(f"This is no action: {error}") from error
        return json.dumps(result.observation), float(result.reward or 0.0), result.done

    try:
        with of_tool():
            begun = await client.reset(seed=task["extra_info"]["index"])
        return await play(endpoint, json.dumps(begun.observation), step)
    finally:
        await client.close()


async def begin_one(kind: str) -> None:
    if kind == "gymnasium":
        made()[0].close()
    elif kind == "openenv":
        await (await connected()).close()
    else:
        raise ConfigError("KIND", kind, "is no kind of environment", "Set it to gymnasium or openenv")


@exits_on_config_error
def main() -> int:
    """Exit code 0, or 2 with one line on standard error for a setting that cannot work."""
    turns()
    asyncio.run(begin_one(os.environ.get("KIND", "gymnasium")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
