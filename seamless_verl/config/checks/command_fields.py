"""Checks of the `{field}`s of agents that are commands against the columns of the data whose rows they answer.

A field that a task does not have fails its session, one after the other. Only the footers of parquet files on this
machine are read. Sources: seamless_verl/agent_loops/loops.py `task_of`, seamless_verl/agents/command.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from seamless_verl.agents.settings import CommandSettings
from seamless_verl.agents.template import parse
from seamless_verl.config.checks.agent_names import COLUMN, loops_of_rows
from seamless_verl.config.checks.agents import LOOPS, SCHEMAS, loops_of
from seamless_verl.config.checks.files import FILE_KEYS, Footer, footer_of, parquet_files
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.errors import ConfigError

ADDED = frozenset({"prompt", "uid", "index", "extra_info"})  # to each task, whatever its row has
OF_COMMANDS = frozenset({"question", "prompt_file", "session"})  # fields of the command line, not of its folder


@check
def check_fields(settings: Settings) -> list[Problem]:
    """A warning for each field that a file lacks whose rows run the command."""
    if settings.get("data.custom_cls.path") is not None:
        return []
    given = [one for number, loop in enumerate(loops_of(settings)) for one in _fields(f"{LOOPS}[{number}]", loop)]
    files = [(key, path) for key in FILE_KEYS for path in parquet_files(settings, key)] if given else []
    found = []
    for file_key, path in files:
        footer, names = footer_of(file_key, path), loops_of_rows(settings, path)
        found += [
            _lacking(key, value, field, f"{file_key}={path}", footer)
            for name, key, value, field in given
            if name in names and not _is_there(field, footer, OF_COMMANDS if key.endswith("command") else frozenset())
        ]
    return [replace(problem, unmade=True) for problem in found] if settings.unmade else found


def _fields(key: str, loop: Mapping[str, Any]) -> Iterator[tuple[str, str, object, str]]:
    """The loop's name, and key, value and name of each field; none of a template that check_loops refuses."""
    if SCHEMAS.get(str(loop.get("_target_"))) is not CommandSettings:
        return
    for part in ("command", "folder"):
        value = loop.get(part)
        for text in value if isinstance(value, list) else [value]:
            try:
                pieces = parse(text, key=part) if isinstance(text, str) else []
            except ConfigError:
                continue
            yield from ((str(loop.get("name")), f"{key}.{part}", value, field) for _, field in pieces if field)


def _is_there(field: str, footer: Footer, more: frozenset[str]) -> bool:
    column, *inner = field.split(".")
    if column not in (footer.columns - {COLUMN}) | ADDED | more:
        return False
    return not inner or inner[0] in footer.fields.get(column, inner)


def _lacking(key: str, value: object, field: str, file: str, footer: Footer) -> Problem:
    column, *inner = field.split(".")
    has = footer.fields[column] if inner and column in footer.fields else footer.columns - {COLUMN}
    what = f"a field of the column {column}" if inner and column in footer.fields else "a column"
    reason = f"{{{field}}} is not {what} of {file} (it has {', '.join(sorted(has))}), so the agent cannot start"
    return Problem(key, value, reason, "Name another one, or add it to the data", warning=True)
