"""The options of `vllm serve`, read from the source of the vLLM that is installed: importing it takes seconds.

Sources: vllm/engine/arg_utils.py, vllm/entrypoints/launchers/cli_args.py (a field of its classes is an option),
vllm/utils/argparse_utils.py `FlexibleArgumentParser`.

What a user gives vLLM's engines through verl: names and parsers that this vLLM has, none of them twice.

Sources: verl/workers/rollout/vllm_rollout/vllm_async_server.py `launch_server`, which makes options of
`vllm serve` of them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

from seamless_verl.config import engine_kwargs
from seamless_verl.config.checks.settings import Problem, Settings, check
from seamless_verl.config.engine_kwargs import KEY, given
from seamless_verl.config.schema import nearest

OPTIONS_KEY = "seamless.gateway.options"
PLUGINS, KNOWN_PLUGINS = "vllm.general_plugins", ("vllm.", "seamless_verl.")  # the second bring no parsers
SOURCES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
READ = ("model", "multimodal", "structured_outputs")  # groups of the engine's options that the gateway reads
UNREAD = frozenset({"quantization", "enforce-eager", "enable-sleep-mode", "enable-cumem-allocator"})  # but of these
ALONE = "structured-outputs-config"  # the one it reads of another group
GROUPED = re.compile(r'(\w+)_group\.add_argument\(\s*"--([a-z][a-z0-9-]+)"')
SERVER = re.compile(r"^class FrontendArgs\b.*?(?=^(?:class|def) )", re.MULTILINE | re.DOTALL)
ENGINES = "actor_rollout_ref.rollout"
WHERE = ("host", "port", "uds")  # a server listens
OPTION, FIELD = re.compile(r'"--([a-z][a-z0-9-]+)"'), re.compile(r"^    ([a-z][a-z0-9_]+): ", re.MULTILINE)
PARSERS = {
    "tool-call-parser": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER", "tool-parser-plugin"),
    "reasoning-parser": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER", "reasoning-parser-plugin"),
}


@check
def check_options(settings: Settings) -> list[Problem]:
    """Each is one that vLLM has and the gateway reads, and the parsers they choose are ones that vLLM has."""
    gateway, known = settings.seamless.gateway, serve_options()
    if not gateway.enabled or not known:
        return []
    given = list(gateway.options)
    if given and not given[0].startswith("-"):
        return [
            Problem(
                OPTIONS_KEY, given[0], "is not an option", f'Write options as \'{OPTIONS_KEY}=["--one","--two=2"]\''
            )
        ]
    named = [option for option in given if option.startswith("--")]
    problems = [_unknown(option, known) or _elsewhere(settings, option) for option in named]
    problems += [_no_parser(name, given) for name in PARSERS]
    return [problem for problem in problems if problem is not None]


@check
def check_reasoning(settings: Settings) -> list[Problem]:
    """Engines and gateway take the same for reasoning."""
    gateway, engines = settings.seamless.gateway, engines_parser(settings)
    chosen = value_of("reasoning-parser", gateway.options)
    if not gateway.enabled or engines is None or chosen in (None, engines):
        return []
    reason = f"engines have {engines}, and would begin a grammar elsewhere than the gateway"
    way_out = f"Leave {engine_kwargs.KEY}.reasoning_parser to the gateway"
    return [Problem(OPTIONS_KEY, f"--reasoning-parser={chosen}", reason, way_out)]


def engines_parser(settings: Settings) -> str | None:
    """The reasoning parser that engines were given, in either of its places."""
    kwargs = settings.get(engine_kwargs.KEY)
    outputs = engine_kwargs.given(kwargs, "structured_outputs_config")
    chosen = [engine_kwargs.given(place, "reasoning_parser") for place in (kwargs, outputs)]
    return next((str(one) for one in chosen if one), None)


@cache
def serve_options() -> frozenset[str]:
    """Their names, without dashes in front; none when there is no vLLM, or its sources have moved."""
    files = [file for source in SOURCES if (file := _source(source)) is not None]
    if len(files) < len(SOURCES):
        return frozenset()
    texts = [file.read_text(encoding="utf-8") for file in files]
    fields = {name.replace("_", "-") for name in FIELD.findall(texts[1])}
    return frozenset(fields.union(*(OPTION.findall(text) for text in texts)))


@cache
def engine_options() -> frozenset[str]:
    """Names of those that only an engine reads, which the gateway has none of."""
    file = _source(SOURCES[0])
    grouped = [] if file is None else GROUPED.findall(file.read_text(encoding="utf-8"))
    return frozenset(name for group, name in grouped if group not in READ and name != ALONE) | UNREAD


@cache
def server_options() -> frozenset[str]:
    """Names of those of vLLM's own HTTP server, in whose place the gateway stands."""
    file = _source(SOURCES[1])
    found = None if file is None else SERVER.search(file.read_text(encoding="utf-8"))
    return frozenset() if found is None else frozenset(name.replace("_", "-") for name in FIELD.findall(found[0]))


def name_of(option: str) -> str:
    """`--no-this_one.key=value` is `this-one`: how it is spelled, switched off or reached into does not count."""
    name = re.split(r"[=.]", option.removeprefix("--"), maxsplit=1)[0]
    return name.replace("_", "-")


def _unknown(option: str, known: frozenset[str]) -> Problem | None:
    if (way_out := unknown(name_of(option), known)) is None:
        return None
    return Problem(OPTIONS_KEY, option, "is not an option of vllm serve", way_out)


def unknown(name: str, known: frozenset[str]) -> str | None:
    """The way out where no option has that name, nor begins with it, as vLLM's parser allows."""
    if {name, name.removeprefix("no-")} & known or any(one.startswith(name) for one in known):
        return None
    near = nearest(name, sorted(known)).partition("? Valid")
    hint = f"{near[0].replace('mean ', 'mean --')}? " if near[1] else ""
    return f"{hint}`vllm serve --help=all` lists them"


def _elsewhere(settings: Settings, option: str) -> Problem | None:
    """An option that has its effect in another place, as far as it is spelled out."""
    name = name_of(option)
    name = name if name in serve_options() else name.removeprefix("no-")
    if name in engine_options():
        key = f"{ENGINES}.{name.replace('-', '_')}"
        if settings.get(key) is None:
            key = f"+{engine_kwargs.KEY}.{name.replace('-', '_')}"
        return Problem(
            OPTIONS_KEY, option, "is for an engine, which the gateway has none of", f"Set {key} for all engines"
        )
    if name in server_options():
        listens = f"; {OPTIONS_KEY.replace('options', 'port')} says where the gateway listens" if name in WHERE else ""
        way_out = f"Leave it out{listens}"
        return Problem(OPTIONS_KEY, option, "is for vLLM's own server, in whose place the gateway stands", way_out)
    return None


def _no_parser(name: str, given: Sequence[str]) -> Problem | None:
    """The choice of a parser, when vLLM has none of that name and no plugin may bring it."""
    chosen, names = value_of(name, given), [name_of(option) for option in given]
    if chosen is None or PARSERS[name][2] in names or (way_out := no_parser(name, chosen)) is None:
        return None
    return Problem(OPTIONS_KEY, f"--{name}={chosen}", f"vLLM has no such {name.replace('-', ' ')}", way_out)


def no_parser(name: str, chosen: str) -> str | None:
    """The way out where vLLM itself has no parser of that name; None where it has, its sources have moved, or an
    installed plugin of its may bring one."""
    place, table, _ = PARSERS[name]
    if not all(plugin.value.startswith(KNOWN_PLUGINS) for plugin in entry_points(group=PLUGINS)):
        return None
    known = [] if (file := _source(place)) is None else _keys(file, table)
    return None if not known or chosen in known else nearest(chosen, known)


def value_of(name: str, given: Sequence[str]) -> str | None:
    """The last value of an option, written behind `=` or as the next item."""
    value = None
    for option, following in zip_longest(given, given[1:]):
        if option.startswith("--") and name_of(option) == name:
            value = option.partition("=")[2] if "=" in option else following
    return value


def _keys(file: Path, table: str) -> list[str]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            named = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if table in named:
                return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    return []


def _source(name: str) -> Path | None:
    spec = find_spec("vllm")
    places = spec.submodule_search_locations if spec is not None else None
    return next((file for place in places or () if (file := Path(place, name)).is_file()), None)


@check
def check_engine_options(settings: Settings) -> list[Problem]:
    """Names that are options of vLLM's, each once."""
    kwargs, known = settings.get(KEY) or {}, serve_options()
    if not known or settings.get("actor_rollout_ref.rollout.name") != "vllm":
        return []
    if not isinstance(kwargs, Mapping):
        return [Problem(KEY, kwargs, "holds options by name", f"Write +{KEY}.<option>=<value>")]
    names = {str(key): name_of(f"--{key}") for key, value in kwargs.items() if _said(value)}
    twice = [name for name, count in Counter(key.replace("_", "-") for key in names).items() if count > 1]
    ways_out = {key: way_out for key, name in names.items() if (way_out := unknown(name, known)) is not None}
    reason = "is not an option of vllm serve"
    problems = [Problem(f"{KEY}.{key}", kwargs[key], reason, way_out) for key, way_out in ways_out.items()]
    problems += [Problem(KEY, name, "is written twice, with - and with _", "Keep one of them") for name in twice]
    return problems + _parser_missing(kwargs)


def _said(value: object) -> bool:
    """Whether verl makes an option of it as it is named: of False it makes none, or a negated one. 0 is a value."""
    return value is not None and value is not False and value != []


def _parser_missing(kwargs: Mapping[str, Any]) -> list[Problem]:
    """Engines read the parser of reasoning alone."""
    chosen, plugin = given(kwargs, "reasoning_parser"), given(kwargs, "reasoning_parser_plugin")
    if not chosen or plugin or (way_out := no_parser("reasoning-parser", str(chosen))) is None:
        return []
    return [Problem(f"{KEY}.reasoning_parser", chosen, "vLLM has no such reasoning parser", way_out)]
