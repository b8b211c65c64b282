"""Checks of the agent loops of a run: the file that names them, its entries, and the default loop.

Every mistake of every entry is reported; a file that cannot be read hides its entries. Nothing of the user's code is
imported (see sources.py).
Sources: verl/experimental/agent_loop/agent_loop.py `AgentLoopWorker`, verl/utils/import_utils.py
`resolve_config_path`, seamless_verl/agents/settings.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seamless_verl.agents.settings import (
    CallableSettings,
    CommandSettings,
    LoopSettings,
    RunnerSettings,
    read_settings,
)
from seamless_verl.config.checks.hosts import has_own_code
from seamless_verl.config.composing import verl_config_dir
from seamless_verl.config.model import OUR_ENGINES
from seamless_verl.config.paths import looking_at, read_yaml
from seamless_verl.config.roles import brings_code
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.sources import check_call, check_dotted, check_name, find_module
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.fields import nearest

AGENT = "actor_rollout_ref.rollout.agent"
LOOPS, DEFAULT = f"{AGENT}.agent_loop_config_path", f"{AGENT}.default_agent_loop"
OURS = "seamless_verl.agent_loops.loops."
REGISTERED = ("single_turn_agent", "tool_agent")  # by verl itself
SCHEMAS: Mapping[str, type[LoopSettings]] = {
    f"{OURS}CallableAgentLoop": CallableSettings,
    f"{OURS}CommandAgentLoop": CommandSettings,
    f"{OURS}RunnerAgentLoop": RunnerSettings,
}
ARGUMENTS = ("task", "endpoint")  # of an agent that is a function
WAY_OUT = "Write a list of entries, each with `name` and `_target_`"
Loop = Mapping[str, Any]


@check
def check_loops(settings: Settings) -> list[Problem]:
    """Each entry has a name of its own, a target that can be found, and settings that its loop takes."""
    loops = loops_of(settings)
    names = [loop.get("name") for loop in loops]
    repeated = [
        Problem(f"{LOOPS}[{number}].name", name, "is the name of an entry above, too", "Give each entry its own name")
        for number, name in enumerate(names)
        if name is not None and name in names[:number]
    ]
    return repeated + [
        problem for number, loop in enumerate(loops) for problem in _entry(settings, f"{LOOPS}[{number}]", loop)
    ]


@check
def check_default_loop(settings: Settings) -> list[Problem]:
    """The loop of prompts that name none is known; code of the user's own may register others."""
    name, known = settings.get(DEFAULT), known_loops(settings)
    if name is None or known is None or name in known:
        return []
    way_out = nearest(str(name), known, then=f"Others are named in {LOOPS}")
    return [Problem(DEFAULT, name, "is not the name of an agent loop", way_out)]


def known_loops(settings: Settings) -> list[str] | None:
    """The names of all agent loops; None where code of the user's own may register others, or choose them."""
    own = settings.get(f"{AGENT}.agent_loop_manager_class"), settings.get("actor_rollout_ref.model.external_lib")
    if own[0] is not None or own[1] not in (None, *OUR_ENGINES) or has_own_code(settings):
        return None
    return [*REGISTERED, *(str(loop["name"]) for loop in loops_of(settings) if "name" in loop)]


def loops_of(settings: Settings) -> list[Loop]:
    """The entries of the file of agent loops; none without a file. ConfigError for a file that verl cannot read."""
    if not settings.get(LOOPS):
        return []
    value = settings.text(LOOPS)
    file = find_file(LOOPS, value, "a YAML file of agent loops")
    loops = read_yaml(LOOPS, value, file)
    if not isinstance(loops, list) or not all(isinstance(loop, Mapping) for loop in loops):
        raise ConfigError(LOOPS, value, "is not a list of agent loops", WAY_OUT)
    return _resolved(value, loops)


def _resolved(file: str, loops: list[Loop]) -> list[Loop]:
    """With the values of `${...}`, as verl resolves them. ConfigError for one that has no value."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(loops), resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(LOOPS, file, reason, "Set the variable, or write the value itself") from error
    assert isinstance(resolved, list)
    return resolved


def find_file(key: str, value: str, what: str) -> Path:
    """A file as verl looks for it: from the working directory, then from where verl is installed."""
    package = verl_config_dir().parents[1]
    places = [Path(value)] if os.path.isabs(value) else [Path(base, value) for base in (".", package.parent, package)]
    with looking_at(key, value):
        for place in places:
            if place.is_file():
                return place
        if any(place.is_dir() for place in places):
            raise ConfigError(key, value, "is a folder", f"Set {key} to {what}")
    reason = f"there is no such file (looked for from {os.getcwd()})"
    raise ConfigError(key, value, reason, f"Set {key} to {what}")


def _entry(settings: Settings, key: str, loop: Loop) -> list[Problem]:
    unnamed = [field for field in ("name", "_target_") if not isinstance(loop.get(field), str) or not loop[field]]
    problems = [Problem(f"{key}.{field}", loop.get(field), "has no value", WAY_OUT) for field in unnamed]
    target = loop.get("_target_")
    if "_target_" in unnamed or not isinstance(target, str):
        return problems
    if (schema := SCHEMAS.get(target)) is None:
        return problems + _problems(lambda: _check_target(settings, f"{key}._target_", target))
    rest = {name: value for name, value in loop.items() if name not in unnamed}
    return problems + _ours(settings, key, schema, rest)


def _ours(settings: Settings, key: str, schema: type[LoopSettings], loop: Loop) -> list[Problem]:
    """The mistakes in an entry's values, and in what those of its values name that are none."""
    try:
        return _named(settings, key, read_settings(schema, loop, key=key))
    except ConfigError as error:
        problems = Problem.all_of(error)
    wrong = {problem.key.removeprefix(f"{key}.").partition(".")[0] for problem in problems}
    rest = {name: value for name, value in loop.items() if name not in wrong}
    try:
        return problems + _named(settings, key, read_settings(schema, rest, key=key))
    except ConfigError:  # a value that the loop needs is among the wrong ones
        return problems


def _problems(body: Callable[[], None]) -> list[Problem]:
    try:
        body()
    except ConfigError as error:
        return Problem.all_of(error)
    return []


def _check_target(settings: Settings, key: str, target: str) -> None:
    if not brings_code(settings):
        check_dotted(key, target, target, "Install it, or put its folder on PYTHONPATH")


def _named(settings: Settings, key: str, loop: LoopSettings) -> list[Problem]:
    """Problems with what the entry names: the agent, or the folder and what its command line needs."""
    if isinstance(loop, CallableSettings):
        return _problems(lambda: _check_agent(settings, f"{key}.agent", loop.agent))
    if isinstance(loop, CommandSettings):
        return _problems(lambda: _check_folder(key, loop)) + _problems(lambda: _check_command(key, loop))
    return []


def _check_agent(settings: Settings, key: str, agent: str) -> None:
    place, _, name = agent.rpartition(":")
    if not place or not name:
        way_out = "Write package.module:name or path/to/file.py:name"
        raise ConfigError(key, agent, "is not of the form place:name", way_out)
    if brings_code(settings) and not os.path.isabs(place):
        return
    name, *attributes = name.split(".")
    file = place
    if not place.endswith(".py"):
        way_out = "Install it or put its folder on PYTHONPATH, or name a file as path/to/file.py:name"
        check_dotted(key, agent, f"{place}.{name}", way_out)
        spec, rest = find_module(f"{place}.{name}")
        file = spec.origin or "" if spec is not None and rest == [name] else ""
    elif os.path.isfile(place):
        check_name(key, agent, place, place, name)
    else:
        raise ConfigError(key, agent, f"there is no file {place}", _other_file(Path(place)))
    if file.endswith(".py") and not attributes:
        check_call(key, agent, file, name, ARGUMENTS)


def _other_file(path: Path) -> str:
    siblings = [str(sibling) for sibling in path.parent.glob("*.py")] if path.parent.is_dir() else []
    match = get_close_matches(str(path), siblings, n=1)
    hint = f"Did you mean {match[0]}? " if match else ""
    return f"{hint}Paths are taken from the working directory, {Path.cwd()}"


def _check_folder(key: str, loop: CommandSettings) -> None:
    if loop.folder is not None and "{" not in loop.folder and not os.path.isdir(loop.folder):
        way_out = f"Paths are taken from the working directory, {Path.cwd()}"
        raise ConfigError(f"{key}.folder", loop.folder, "there is no such folder", way_out)


def _check_command(key: str, loop: CommandSettings) -> None:
    try:
        _ = replace(loop, folder=loop.folder if loop.folder and "{" in loop.folder else None).agent_command
    except ConfigError as error:
        raise ConfigError(f"{key}.{error.key}", error.value, error.reason, error.way_out) from error


READ = re.compile(r"oc\.env:\s*(\w+)")


def variables_of(config: DictConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are set here and that the file of agent loops reads (`${oc.env:NAME}`).

    verl reads that file in its agent loop workers. In a cluster that was there before, these have the environment of
    the command that started their node, so the values go with the task runner to the workers. They are kept out of the
    config, which is printed and given to trackers: one may be a key.
    """
    given = OmegaConf.select(config, LOOPS)
    if not given:
        return {}
    text = find_file(LOOPS, str(given), "a YAML file of agent loops").read_text(encoding="utf-8")
    return {name: environ[name] for name in READ.findall(text) if name in environ}
