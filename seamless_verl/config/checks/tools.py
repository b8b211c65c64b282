"""Checks of the tools of verl's own agent loops: the files that name them, their classes, and the parser of calls.

verl loads tools in each agent loop worker, minutes after the start. Nothing of the user's code is imported here (see
sources.py). Sources: verl/experimental/agent_loop/agent_loop.py `AgentLoopWorker`, verl/tools/tool_registry.py
`initialize_tools_from_config`, verl/tools/function_tool.py, verl/experimental/agent_loop/tool_parser.py.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seamless_verl.config.checks.agents import find_file
from seamless_verl.config.checks.hosts import has_own_code
from seamless_verl.config.checks.sources import check_dotted, derives_from
from seamless_verl.config.paths import looking_at, read_yaml
from seamless_verl.config.roles import brings_code
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.fields import nearest

TURNS = "actor_rollout_ref.rollout.multi_turn"
TOOLS, FUNCTIONS, FORMAT = f"{TURNS}.tool_config_path", f"{TURNS}.function_tool_path", f"{TURNS}.format"
BASE = "verl.tools.base_tool.BaseTool"
DECORATOR = "function_tool"
KIND = "native"  # the only kind of tool in verl 0.9.1
# verl 0.9.1, `ToolParser.register` in experimental/agent_loop/tool_parser.py.
TOOL_PARSERS = ("deepseek_v4", "gemma4", "glm", "gpt-oss", "hermes", "kimi", "minimax", "qwen3_coder", "seed")
INSTALL = "Install it, or put its folder on PYTHONPATH"
VERLS = "verl.tools."
EXAMPLES = "verl 0.9.1 has no example tools: copy the class into a file, put its folder on PYTHONPATH, and name it"
WAY_OUT = "Write `tools:`, a list of entries with `class_name` and `config: {type: native}`"


@check
def check_tools(settings: Settings) -> list[Problem]:
    """The file of tools can be read, and each entry names a class that derives from verl's BaseTool."""
    if (path := _local(settings, TOOLS)) is None:
        return []
    tools = _tools(settings.text(TOOLS), find_file(TOOLS, path, "a YAML file of tools"))
    return [problem for number, tool in enumerate(tools) for problem in _entry(settings, f"{TOOLS}[{number}]", tool)]


@check
def check_function_tools(settings: Settings) -> list[Problem]:
    """The file of function tools is Python, and decorates a function."""
    if (path := _local(settings, FUNCTIONS)) is None:
        return []
    file = find_file(FUNCTIONS, path, f"a Python file with functions under @{DECORATOR}")
    with looking_at(FUNCTIONS, path):
        source = file.read_bytes()
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(FUNCTIONS, path, f"is not Python: {error}", "Correct the file") from error
    decorators = (one for node in ast.walk(tree) for one in getattr(node, "decorator_list", ()))
    if any(DECORATOR in ast.unparse(one) for one in decorators):
        return []
    way_out = f"Decorate each tool with @{DECORATOR} of verl.tools.function_tool"
    return [Problem(FUNCTIONS, path, f"no function in it is decorated with @{DECORATOR}", way_out, warning=True)]


@check
def check_tool_format(settings: Settings) -> list[Problem]:
    """verl has a parser of tool calls by that name; a warning where the user's own code may add one."""
    name = settings.get(FORMAT)
    if name is None or name in TOOL_PARSERS:
        return []
    reason = "is none of verl's parsers of tool calls"
    return [Problem(FORMAT, name, reason, nearest(str(name), list(TOOL_PARSERS)), has_own_code(settings))]


def _local(settings: Settings, key: str) -> str | None:
    """The path, where it is given and its file is one of this machine's."""
    if not settings.get(key):
        return None
    path = settings.text(key)
    return None if brings_code(settings) and not os.path.isabs(path) else path


def _tools(value: str, file: Path) -> list[Any]:
    tree = read_yaml(TOOLS, value, file)
    tools = tree.get("tools") if isinstance(tree, Mapping) else None
    if not isinstance(tools, list):
        raise ConfigError(TOOLS, value, "has no list `tools`", WAY_OUT)
    return tools


def _entry(settings: Settings, key: str, tool: Any) -> list[Problem]:
    if not isinstance(tool, Mapping):
        return [Problem(key, tool, "is not an entry of a tool", WAY_OUT)]
    name, config = tool.get("class_name"), tool.get("config")
    kind = config.get("type") if isinstance(config, Mapping) else None
    problems = []
    if kind != KIND:
        problems.append(
            Problem(f"{key}.config.type", kind, f"is no kind of tool in verl 0.9.1, but {KIND} is", WAY_OUT)
        )
    if not isinstance(name, str) or "." not in name:
        problems.append(Problem(f"{key}.class_name", name, "is not of the form package.module.Class", WAY_OUT))
    elif not brings_code(settings):
        problems += _class(f"{key}.class_name", name)
    return problems


def _class(key: str, name: str) -> list[Problem]:
    try:
        check_dotted(key, name, name, EXAMPLES if name.startswith(VERLS) else INSTALL)
    except ConfigError as error:
        return Problem.all_of(error)
    if derives_from(name, BASE):
        return []
    return [Problem(key, name, f"does not derive from {BASE}", "Derive it, or name a class that does")]
