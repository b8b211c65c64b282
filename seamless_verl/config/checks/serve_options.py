"""Checks of vLLM's options: those of the gateway, and those that a user gives the engines through verl.

Each is an option of the installed vLLM, given once, that the run does not set itself, and names parsers that vLLM has.
The options are read from vLLM's source, because importing vLLM takes seconds.

Sources, below vllm/: engine/arg_utils.py; entrypoints/launchers/cli_args.py or entrypoints/openai/cli_args.py, where a
field of a class is an option; utils/argparse_utils.py `FlexibleArgumentParser`. In verl:
workers/rollout/vllm_rollout/vllm_async_server.py `launch_server`, which passes `engine_kwargs` as options.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from seamless_verl.config import engine_kwargs
from seamless_verl.config.engine_kwargs import KEY, given
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.runtime.fields import nearest

OPTIONS_KEY = "seamless.gateway.options"
PLUGINS, KNOWN_PLUGINS = "vllm.general_plugins", ("vllm.", "seamless_verl.")  # these add no parsers
ENGINE_SOURCE = "engine/arg_utils.py"
SERVER_SOURCES = ("entrypoints/launchers/cli_args.py", "entrypoints/openai/cli_args.py")  # of vLLM 0.29; 0.24
READ = ("model", "multimodal", "structured_outputs")  # groups of the engine's options that the gateway reads
UNREAD = frozenset({"quantization", "enforce-eager", "enable-sleep-mode", "enable-cumem-allocator"})  # except these
ALSO_READ = "structured-outputs-config"  # of another group
GROUPED = re.compile(r'(\w+)_group\.add_argument\(\s*"--([a-z][a-z0-9-]+)"')
SERVER = re.compile(r"^class FrontendArgs\b.*?(?=^(?:class|def) )", re.MULTILINE | re.DOTALL)
ENGINES = "actor_rollout_ref.rollout"
ADDRESS = ("host", "port", "uds")  # where a server listens
# Read by the gateway, and given by the run itself (data_plane/client.py): another value would contradict the engines'.
OF_THE_RUN = {
    "model": "actor_rollout_ref.model.path",
    "max-model-len": f"{ENGINES}.max_model_len",
    "dtype": f"{ENGINES}.dtype",
}
AUTO_TOOLS, TOOL_PARSER = "enable-auto-tool-choice", "tool-call-parser"  # vLLM reads tool calls with both
OPTION, FIELD = re.compile(r'"--([a-z][a-z0-9-]+)"'), re.compile(r"^    ([a-z][a-z0-9_]+): ", re.MULTILINE)
PARSERS = {
    "tool-call-parser": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER", "tool-parser-plugin"),
    "reasoning-parser": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER", "reasoning-parser-plugin"),
}


@check
def check_options(settings: Settings) -> list[Problem]:
    """Each is an option of vLLM that the gateway reads, and vLLM has the parsers that they choose."""
    gateway, known = settings.seamless.gateway, serve_options()
    given = list(gateway.options)
    if not gateway.enabled:
        return []
    if not known:
        reason = "cannot be checked: vLLM is not installed, or its options are defined in files we do not know"
        way_out = "Install a version of vLLM that is listed in the README"
        return [Problem(OPTIONS_KEY, given, reason, way_out, warning=True)] if given and find_spec("vllm") else []
    if given and not given[0].startswith("-"):
        return [
            Problem(
                OPTIONS_KEY, given[0], "is not an option", f'Write options as \'{OPTIONS_KEY}=["--one","--two=2"]\''
            )
        ]
    named = [option for option in given if option.startswith("--")]
    problems = [_unknown(option, known) or _set_elsewhere(settings, option) for option in named]
    problems += [_no_parser(name, given) for name in PARSERS]
    problems.append(_half_of_tools(given))
    return [problem for problem in problems if problem is not None]


@check
def check_reasoning(settings: Settings) -> list[Problem]:
    """Engines and gateway have the same reasoning parser."""
    gateway, engines = settings.seamless.gateway, engines_parser(settings)
    chosen = value_of("reasoning-parser", gateway.options)
    if not gateway.enabled or engines is None or chosen in (None, engines):
        return []
    reason = f"engines have {engines}, and would start a grammar at another token than the gateway"
    way_out = f"Leave {engine_kwargs.KEY}.reasoning_parser to the gateway"
    return [Problem(OPTIONS_KEY, f"--reasoning-parser={chosen}", reason, way_out)]


def engines_parser(settings: Settings) -> str | None:
    """The reasoning parser of the engines' own options, from either of its two places."""
    kwargs = settings.get(engine_kwargs.KEY)
    outputs = engine_kwargs.given(kwargs, "structured_outputs_config")
    chosen = [engine_kwargs.given(node, "reasoning_parser") for node in (kwargs, outputs)]
    return next((str(parser) for parser in chosen if parser), None)


@cache
def serve_options() -> frozenset[str]:
    """Names of all options, without dashes in front; none without vLLM, or when its sources have moved."""
    engine, server = _source(ENGINE_SOURCE), _source(*SERVER_SOURCES)
    if engine is None or server is None:
        return frozenset()
    text = server.read_text(encoding="utf-8")
    fields = {name.replace("_", "-") for name in FIELD.findall(text)}
    return frozenset(fields.union(OPTION.findall(text), OPTION.findall(engine.read_text(encoding="utf-8"))))


@cache
def engine_options() -> frozenset[str]:
    """Names of the options that only an engine reads; the gateway has no engine."""
    file = _source(ENGINE_SOURCE)
    grouped = [] if file is None else GROUPED.findall(file.read_text(encoding="utf-8"))
    return frozenset(name for group, name in grouped if group not in READ and name != ALSO_READ) | UNREAD


@cache
def server_options() -> frozenset[str]:
    """Names of the options of vLLM's own HTTP server, which the gateway replaces."""
    file = _source(*SERVER_SOURCES)
    found = None if file is None else SERVER.search(file.read_text(encoding="utf-8"))
    return frozenset() if found is None else frozenset(name.replace("_", "-") for name in FIELD.findall(found[0]))


def name_of(option: str) -> str:
    """The name alone, spelled with dashes: that of `--this_option.key=value` is `this-option`."""
    name = re.split(r"[=.]", option.removeprefix("--"), maxsplit=1)[0]
    return name.replace("_", "-")


def full_name(option: str) -> str:
    """The name that vLLM's parser takes it for: the beginning of one name is enough."""
    name, known = name_of(option), serve_options()
    longer = [other for other in known if other.startswith(name)]
    return longer[0] if name not in known and len(longer) == 1 else name


def _unknown(option: str, known: frozenset[str]) -> Problem | None:
    if (way_out := unknown(name_of(option), known)) is None:
        return None
    return Problem(OPTIONS_KEY, option, "is not an option of vllm serve", way_out)


def unknown(name: str, known: frozenset[str]) -> str | None:
    """The way out where no option has that name or begins with it, which vLLM's parser allows; else None."""
    if {name, name.removeprefix("no-")} & known or any(option.startswith(name) for option in known):
        return None
    near = get_close_matches(name, sorted(known), n=1)
    hint = f"Did you mean --{near[0]}? " if near else ""
    return f"{hint}`vllm serve --help=all` lists them"


def _set_elsewhere(settings: Settings, option: str) -> Problem | None:
    """The problem of an option that the gateway does not read, and where it is set instead."""
    name = full_name(option)
    name = name if name in serve_options() else name.removeprefix("no-")
    if name in OF_THE_RUN:
        way_out = f"Set {OF_THE_RUN[name]} for the run and its engines"
        return Problem(OPTIONS_KEY, option, "is set by the run, as its engines have it", way_out)
    if name in engine_options():
        key = f"{ENGINES}.{name.replace('-', '_')}"
        if settings.get(key) is None:
            key = f"+{engine_kwargs.KEY}.{name.replace('-', '_')}"
        return Problem(OPTIONS_KEY, option, "is for an engine, and the gateway has none", f"Set {key} for all engines")
    if name in server_options():
        listens = (
            f"; {OPTIONS_KEY.replace('options', 'port')} says where the gateway listens" if name in ADDRESS else ""
        )
        way_out = f"Leave it out{listens}"
        return Problem(OPTIONS_KEY, option, "is for vLLM's own server, which the gateway replaces", way_out)
    return None


def _half_of_tools(given: Sequence[str]) -> Problem | None:
    """The problem of one of the two options of tool calls: vLLM raises without the parser, else it reads no calls."""
    named = [full_name(option) for option in given if option.startswith("--")]
    if AUTO_TOOLS in named and TOOL_PARSER not in named:
        way_out = f'Add the model\'s parser: \'{OPTIONS_KEY}=["--{AUTO_TOOLS}","--{TOOL_PARSER}=hermes"]\''
        return Problem(OPTIONS_KEY, f"--{AUTO_TOOLS}", f"needs --{TOOL_PARSER} beside it", way_out)
    if TOOL_PARSER not in named or {AUTO_TOOLS, f"no-{AUTO_TOOLS}"} & set(named):
        return None
    chosen = f"--{TOOL_PARSER}={value_of(TOOL_PARSER, given)}"
    reason = f"reads no tool calls that the model chooses to make, without --{AUTO_TOOLS}"
    way_out = f'Write \'{OPTIONS_KEY}=["--{AUTO_TOOLS}","{chosen}"]\''
    return Problem(OPTIONS_KEY, chosen, reason, way_out, warning=True)


def _no_parser(name: str, given: Sequence[str]) -> Problem | None:
    """The problem of a chosen parser that vLLM does not have, and that no plugin may add."""
    chosen, names = value_of(name, given), [name_of(option) for option in given]
    if chosen is None or PARSERS[name][2] in names or (way_out := no_parser(name, chosen)) is None:
        return None
    return Problem(OPTIONS_KEY, f"--{name}={chosen}", f"vLLM has no such {name.replace('-', ' ')}", way_out)


def no_parser(name: str, chosen: str) -> str | None:
    """The way out for a parser that vLLM does not have.

    None where vLLM has it, its sources have moved, or an installed plugin of vLLM may add it.
    """
    place, table, _ = PARSERS[name]
    if not all(plugin.value.startswith(KNOWN_PLUGINS) for plugin in entry_points(group=PLUGINS)):
        return None
    known = [] if (file := _source(place)) is None else _keys(file, table)
    return None if not known or chosen in known else nearest(chosen, known)


def value_of(name: str, given: Sequence[str]) -> str | None:
    """The last value of an option, written behind `=` or as the next item."""
    value = None
    for option, following in zip_longest(given, given[1:]):
        if option.startswith("--") and full_name(option) == name:
            value = option.partition("=")[2] if "=" in option else following
    return value


def _keys(file: Path, table: str) -> list[str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            named = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if table in named:
                return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    return []


def _source(*names: str) -> Path | None:
    """The first of these files of vLLM that there is."""
    spec = find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    return next((file for place in places or () for name in names if (file := Path(place, name)).is_file()), None)


@check
def check_engine_options(settings: Settings) -> list[Problem]:
    """Each key is an option of vLLM, given once."""
    kwargs, known = settings.get(KEY) or {}, serve_options()
    if not known or settings.get("actor_rollout_ref.rollout.name") != "vllm":
        return []
    if not isinstance(kwargs, Mapping):
        return [Problem(KEY, kwargs, "holds options by name", f"Write +{KEY}.<option>=<value>")]
    names = {str(key): name_of(f"--{key}") for key, value in kwargs.items() if _becomes_option(value)}
    twice = [name for name, count in Counter(key.replace("_", "-") for key in names).items() if count > 1]
    ways_out = {key: way_out for key, name in names.items() if (way_out := unknown(name, known)) is not None}
    reason = "is not an option of vllm serve"
    problems = [Problem(f"{KEY}.{key}", kwargs[key], reason, way_out) for key, way_out in ways_out.items()]
    problems += [Problem(KEY, name, "is written twice, with - and with _", "Keep one of them") for name in twice]
    return problems + _parser_missing(kwargs)


def _becomes_option(value: object) -> bool:
    """Whether verl passes the option under its name; False is left out, or passed negated. 0 is a value."""
    return value is not None and value is not False and value != []


def _parser_missing(kwargs: Mapping[str, Any]) -> list[Problem]:
    """The reasoning parser is one of vLLM's; engines read no other parser."""
    chosen, plugin = given(kwargs, "reasoning_parser"), given(kwargs, "reasoning_parser_plugin")
    if not chosen or plugin or (way_out := no_parser("reasoning-parser", str(chosen))) is None:
        return []
    return [Problem(f"{KEY}.reasoning_parser", chosen, "vLLM has no such reasoning parser", way_out)]
