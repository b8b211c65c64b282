"""The options of `vllm serve`, read from the source of the vLLM that is installed: importing it takes seconds.

Sources: vllm/engine/arg_utils.py, vllm/entrypoints/launchers/cli_args.py (a field of its classes is an option),
vllm/utils/argparse_utils.py `FlexibleArgumentParser`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.schema import nearest

KEY = "seamless.gateway.options"
SOURCES = ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py")
OPTION, FIELD = re.compile(r'"--([a-z][a-z0-9-]+)"'), re.compile(r"^    ([a-z][a-z0-9_]+): ", re.MULTILINE)
PARSERS = {
    "tool-call-parser": ("tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER", "tool-parser-plugin"),
    "reasoning-parser": ("reasoning/__init__.py", "_REASONING_PARSERS_TO_REGISTER", "reasoning-parser-plugin"),
}


@check
def check_options(settings: Settings) -> list[Problem]:
    """Each is one that vLLM has, and the parsers they choose are ones that it has."""
    gateway, known = settings.seamless.gateway, serve_options()
    if not gateway.enabled or not known:
        return []
    given = list(gateway.options)
    if given and not given[0].startswith("-"):
        return [Problem(KEY, given[0], "is not an option", f'Write options as \'{KEY}=["--one","--two=2"]\'')]
    problems = [_unknown(option, known) for option in given if option.startswith("--")]
    problems += [_no_parser(name, given) for name in PARSERS]
    return [problem for problem in problems if problem is not None]


@cache
def serve_options() -> frozenset[str]:
    """Their names, without dashes in front; none when there is no vLLM, or its sources have moved."""
    files = [file for source in SOURCES if (file := _source(source)) is not None]
    if len(files) < len(SOURCES):
        return frozenset()
    texts = [file.read_text(encoding="utf-8") for file in files]
    fields = {name.replace("_", "-") for name in FIELD.findall(texts[1])}
    return frozenset(fields.union(*(OPTION.findall(text) for text in texts)))


def name_of(option: str) -> str:
    """`--no-this_one.key=value` is `this-one`: how it is spelled, switched off or reached into does not count."""
    name = re.split(r"[=.]", option.removeprefix("--"), maxsplit=1)[0]
    return name.replace("_", "-")


def _unknown(option: str, known: frozenset[str]) -> Problem | None:
    name = name_of(option)
    if {name, name.removeprefix("no-")} & known or any(one.startswith(name) for one in known):
        return None
    near = nearest(name, sorted(known)).partition("? Valid")
    hint = f"{near[0].replace('mean ', 'mean --')}? " if near[1] else ""
    return Problem(KEY, option, "is not an option of vllm serve", f"{hint}`vllm serve --help=all` lists them")


def _no_parser(name: str, given: Sequence[str]) -> Problem | None:
    """The choice of a parser, when vLLM has none of that name and no plugin may bring it."""
    place, table, plugin = PARSERS[name]
    file, names = _source(place), [name_of(option) for option in given]
    chosen, known = _value(name, given), [] if file is None else _keys(file, table)
    if chosen is None or plugin in names or not known or chosen in known:
        return None
    return Problem(KEY, f"--{name}={chosen}", f"vLLM has no such {name.replace('-', ' ')}", nearest(chosen, known))


def _value(name: str, given: Sequence[str]) -> str | None:
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
