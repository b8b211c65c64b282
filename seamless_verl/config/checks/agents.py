"""The agent loops of a run: the file that names them, and what its entries need.

Sources: verl/experimental/agent_loop/agent_loop.py `AgentLoopWorker`, verl/utils/import_utils.py
`resolve_config_path`, seamless_verl/agent_loops/loops.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seamless_verl.config.checks.roles import brings_code
from seamless_verl.config.checks.settings import Problem, Settings, check
from seamless_verl.config.checks.sources import check_dotted, check_name
from seamless_verl.config.composing import verl_config_dir
from seamless_verl.config.schema import nearest
from seamless_verl.errors import ConfigError

AGENT = "actor_rollout_ref.rollout.agent"
LOOPS, DEFAULT = f"{AGENT}.agent_loop_config_path", f"{AGENT}.default_agent_loop"
OURS = "seamless_verl.agent_loops.loops."
OUR_ENGINE = "seamless_verl.platform.engine"
REGISTERED = ("single_turn_agent", "tool_agent")  # by verl itself
COMMON = ("name", "_target_", "time_limit_s", "failure_reward")
FIELDS = {
    f"{OURS}CallableAgentLoop": ("agent",),
    f"{OURS}CommandAgentLoop": ("command", "folder", "env"),
}
WAY_OUT = "Write a list of entries, each with `name` and `_target_`"
Loop = Mapping[str, Any]


@check
def check_loops(settings: Settings) -> list[Problem]:
    """Every entry names what is there."""
    problems = []
    for number, loop in enumerate(loops_of(settings)):
        try:
            _entry(settings, f"{LOOPS}[{number}]", loop)
        except ConfigError as error:
            problems.append(Problem.of(error))
    return problems


@check
def check_default_loop(settings: Settings) -> list[Problem]:
    """The loop of every prompt that names none is known; code of the user's own may register any."""
    name = settings.get(DEFAULT)
    own = settings.get(f"{AGENT}.agent_loop_manager_class"), settings.get("actor_rollout_ref.model.external_lib")
    if name is None or own[0] is not None or own[1] not in (None, OUR_ENGINE):
        return []
    known = [*REGISTERED, *(str(loop["name"]) for loop in loops_of(settings) if "name" in loop)]
    if name in known:
        return []
    way_out = f"{nearest(str(name), known)}; others are named in {LOOPS}"
    return [Problem(DEFAULT, name, "is not the name of an agent loop", way_out)]


def loops_of(settings: Settings) -> list[Loop]:
    """The entries of the file of agent loops; none without a file. ConfigError for what verl cannot read."""
    if not settings.get(LOOPS):
        return []
    value = settings.text(LOOPS)
    try:
        loops = yaml.safe_load(_find(value).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(LOOPS, value, f"is not YAML: {told}", "Mend the file") from error
    except OSError as error:
        raise ConfigError(LOOPS, value, f"cannot be read: {error.strerror}", "Allow it to be read") from error
    if not isinstance(loops, list) or not all(isinstance(loop, Mapping) for loop in loops):
        raise ConfigError(LOOPS, value, "is not a list of agent loops", WAY_OUT)
    return _resolved(value, loops)


def _resolved(file: str, loops: list[Loop]) -> list[Loop]:
    """With the values of `${...}`, as verl has them when it makes a loop. ConfigError for one without."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(loops), resolve=True)
    except OmegaConfBaseException as error:
        told = str(error).splitlines()[0]
        raise ConfigError(LOOPS, file, told, "Set the variable, or write the value itself") from error
    assert isinstance(resolved, list)
    return resolved


def _find(value: str) -> Path:
    """As verl looks for it: from the working directory, then from where verl is installed."""
    package = verl_config_dir().parents[1]
    places = [Path(value)] if os.path.isabs(value) else [Path(base, value) for base in (".", package.parent, package)]
    for place in places:
        if place.is_file():
            return place
    if any(place.is_dir() for place in places):
        raise ConfigError(LOOPS, value, "is a folder", f"Set {LOOPS} to a YAML file of agent loops")
    reason = f"there is no such file (looked for from {os.getcwd()})"
    raise ConfigError(LOOPS, value, reason, f"Set {LOOPS} to a YAML file of agent loops")


def _entry(settings: Settings, key: str, loop: Loop) -> None:
    for field in ("name", "_target_"):
        if not isinstance(loop.get(field), str) or not loop[field]:
            raise ConfigError(f"{key}.{field}", loop.get(field), "has no value", WAY_OUT)
    target = loop["_target_"]
    if not brings_code(settings):
        check_dotted(f"{key}._target_", target, target, "Install it, or put its folder on PYTHONPATH")
    if target in FIELDS:
        _ours(settings, key, target, loop)


def _ours(settings: Settings, key: str, target: str, loop: Loop) -> None:
    known = [*COMMON, *FIELDS[target]]
    for field, value in loop.items():
        if field not in known and not str(field).startswith("_"):
            raise ConfigError(f"{key}.{field}", value, "is not a known key", nearest(str(field), known))
    limit = loop.get("time_limit_s", 1)
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit <= 0:
        way_out = f"Set {key}.time_limit_s=600, or leave it out"
        raise ConfigError(f"{key}.time_limit_s", limit, "must be a number of seconds above 0", way_out)
    if "agent" in FIELDS[target]:
        _agent(settings, f"{key}.agent", loop.get("agent"))
    else:
        _command(key, loop)


def _agent(settings: Settings, key: str, where: Any) -> None:
    place, _, name = str(where or "").rpartition(":")
    if not place or not name or not isinstance(where, str):
        way_out = "Write package.module:name or path/to/file.py:name"
        raise ConfigError(key, where, "is not of the form place:name", way_out)
    if brings_code(settings) and not os.path.isabs(place):
        return
    name = name.split(".")[0]
    if not place.endswith(".py"):
        way_out = "Install it or put its folder on PYTHONPATH, or name a file as path/to/file.py:name"
        check_dotted(key, where, f"{place}.{name}", way_out)
    elif os.path.isfile(place):
        check_name(key, where, place, place, name)
    else:
        raise ConfigError(key, where, f"there is no file {place}", _other_file(Path(place)))


def _other_file(path: Path) -> str:
    near = [str(one) for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
    match = get_close_matches(str(path), near, n=1)
    hint = f"Did you mean {match[0]}? " if match else ""
    return f"{hint}Paths are taken from the working directory, {Path.cwd()}"


def _command(key: str, loop: Loop) -> None:
    command, folder = loop.get("command"), loop.get("folder")
    listed = isinstance(command, list) and all(isinstance(word, (str, int, float)) for word in command)
    if not command or not (isinstance(command, str) or listed):
        raise ConfigError(f"{key}.command", command, "is no command line", "Write it as [python, agent.py]")
    if folder is None:
        return
    if not isinstance(folder, str) or not os.path.isdir(folder):
        way_out = f"Paths are taken from the working directory, {Path.cwd()}"
        raise ConfigError(f"{key}.folder", folder, "there is no such folder", way_out)
