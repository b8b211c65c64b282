"""Checks of which agent loop each prompt gets: the one that its row names as `agent_name`, else the default loop.

Of the data that column alone is read, in every row: verl looks a name up when a prompt's turn comes, hours after the
start. The default loop counts only where the data has no such column. Files that are not parquet on this machine, and
those that a data set class of the user's own reads, are not checked.

A `{field}` of an agent's command that a task does not have fails its session, one after the other: fields are compared
with the columns of the data whose rows the command answers.

Sources: verl/trainer/ppo/v1/agent_loop_tq.py, verl/experimental/agent_loop/agent_loop.py `_run_agent_loop`; tools are
read by verl/experimental/agent_loop/tool_agent_loop.py and not by single_turn_agent_loop.py; seamless_verl's `task_of`
in agent_loops/loops.py, and agents/command.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from seamless_verl.agents.settings import CommandSettings
from seamless_verl.agents.template import parse
from seamless_verl.config.checks.agents import DEFAULT, LOOPS, SCHEMAS, known_loops, loops_of
from seamless_verl.config.checks.files import FILE_KEYS, Footer, footer_of, parquet_files
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.fields import nearest

COLUMN = "agent_name"
SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"
REPORTED = 4  # unknown names of one file, at most
MOST = {key: key.replace("files", "max_samples") for key in FILE_KEYS}
Named = dict[str | None, int]  # each name with the number of the first row that has it; None is a null


@check
def check_agent_names(settings: Settings) -> list[Problem]:
    """Each name in the column is one of a loop; a warning where only some rows of a file are read."""
    known = known_loops(settings)
    if known is None or settings.get("data.custom_cls.path") is not None:
        return []
    return _of_data(
        settings,
        [
            _unknown(key, path, name, row, known, warning=settings.integer(MOST[key], -1, least=-1) > 0)
            for key in FILE_KEYS
            for path in parquet_files(settings, key)
            for name, row in [(n, r) for n, r in (_named(path) or {}).items() if n not in known][:REPORTED]
        ],
    )


@check
def check_own_loops_run(settings: Settings) -> list[Problem]:
    """A warning where training never runs a loop of the user's file."""
    own = [str(loop["name"]) for loop in loops_of(settings) if loop.get("name")]
    key, default = FILE_KEYS[0], _default(settings)
    used = _used(settings, key)
    if not own or used is None or known_loops(settings) is None or used & set(own):
        return []
    none_of = f"no prompt runs a loop of {LOOPS} ({', '.join(own)})"
    in_data = f"{' or '.join(own)} into the data's column {COLUMN}"
    if used == {default} and not _column_given(settings, key):
        reason = f"is the loop of every prompt, since {key} has no column {COLUMN}; {none_of}"
        problem = Problem(DEFAULT, default, reason, f"Set {DEFAULT}={own[0]}, or write {in_data}", warning=True)
    else:
        names = ", ".join(sorted(map(str, used)))
        reason = f"its column {COLUMN} has {names}, and wins over {DEFAULT}={default}; {none_of}"
        way_out = f"Write {in_data}, or remove the column and set {DEFAULT}={own[0]}"
        problem = Problem(key, settings.get(key), reason, way_out, warning=True)
    return _of_data(settings, [problem])


def _of_data(settings: Settings, problems: list[Problem]) -> list[Problem]:
    return [one.changed(warning=True, unmade=True) for one in problems] if settings.unmade else problems


def _unknown(key: str, path: str, name: str | None, row: int, known: list[str], *, warning: bool) -> Problem:
    if name is None:
        way_out = f"Write one into each row ({', '.join(known)}), or remove the column"
        return Problem(key, path, f"its column {COLUMN} has no value in row {row} (from 0)", way_out, warning)
    reason = f"its column {COLUMN} has {name!r} in row {row} (from 0), and no agent loop has that name"
    loops = f"There are {', '.join(known)}. Correct the data, or name the loop in {LOOPS}"
    near = nearest(name, known)
    return Problem(key, path, reason, f"{near} {loops}" if near.startswith("Did") else loops, warning)


def _default(settings: Settings) -> str:
    return settings.text(DEFAULT, SINGLE_TURN)


def _used(settings: Settings, key: str) -> set[str | None] | None:
    """The names of the loops that prompts of these files run; None where the files do not show it."""
    value, paths = settings.get(key), parquet_files(settings, key)
    if settings.get("data.custom_cls.path") is not None or len(paths) != len(value if isinstance(value, list) else [0]):
        return None
    return {name for path in paths for name in loops_of_rows(settings, path)}


def loops_of_rows(settings: Settings, path: str) -> set[str | None]:
    """The names of the loops that the rows of a parquet file run."""
    named = _named(path)
    return {_default(settings)} if named is None else set(named)


def _column_given(settings: Settings, key: str) -> bool:
    return any(_named(path) is not None for path in parquet_files(settings, key))


def _named(path: str) -> Named | None:
    """The names in a file's column, rows counted from 0; None without the column, or where check_data refuses it."""
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except OSError:
        return None


@lru_cache(maxsize=64)  # several checks ask for the same files, which may be large
def _read(path: str, changed: int) -> Named | None:
    del changed
    from pyarrow import ArrowInvalid, ArrowNotImplementedError, compute, parquet, types

    found: Named = {}
    try:
        with parquet.ParquetFile(path) as file:
            if COLUMN not in file.schema_arrow.names:
                return None
            start = 0
            for batch in file.iter_batches(columns=[COLUMN]):
                column = batch.column(0)
                if types.is_dictionary(column.type):  # as pandas writes categories
                    column = column.dictionary_decode()
                for value in column.unique():
                    at = compute.index(column.is_null(), True) if not value.is_valid else compute.index(column, value)
                    found.setdefault(str(value.as_py()) if value.is_valid else None, start + at.as_py())
                start += len(column)
    except (ArrowInvalid, ArrowNotImplementedError):  # the second one: its values are no texts
        return None
    return found


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
    return [problem.changed(unmade=True) for problem in found] if settings.unmade else found


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
