"""Fills the `{field}`s of a command with values of the task: `{extra_info.repo}`. `{{` and `}}` stand for braces.

In a list each argument is filled by itself. In a shell string every value is put between single quotes (`shlex.quote`),
which the shell takes literally only outside of other quotes. So a field is refused inside quotes and comments, after
`\\` or `$`, and next to constructs that read their contents a second time (backticks, `<<`, `((`, `$[`, `$'`). A
template cannot notice a command that runs its argument as code (`eval`, `ssh`), or takes one with a leading `-` for an
option. Values that are no text become JSON. The kernel takes at most 128 KiB for each argument.
"""

from __future__ import annotations

import json
import re
import shlex
import string
from collections.abc import Iterable, Mapping
from typing import Any

from seamless_verl.errors import ConfigError

Piece = tuple[str, str | None]  # literal text, and the field that follows it
READ_TWICE = ("`", "<<", "((", "$[", "$'")
WAY_OUT = "Put the field outside, as a word of its own, or read it from task.json"


def parse(text: str, *, key: str) -> list[Piece]:
    """The text as literals and fields; raises ConfigError for braces that are neither."""
    try:
        pieces = [(literal, name, spec, how) for literal, name, spec, how in string.Formatter().parse(text)]
    except ValueError as error:
        raise ConfigError(key, text, str(error), "Write {{ and }} for braces") from error
    for _, name, spec, how in pieces:
        if name is not None and (spec or how or not re.fullmatch(r"\w+(\.\w+)*", name)):
            raise ConfigError(key, text, f"'{{{name}}}' names no field", "Write {name}, or {{ and }} for braces")
    return [(literal, name) for literal, name, _, _ in pieces]


def check_shell(pieces: Iterable[Piece], *, key: str, text: str) -> None:
    """Raise ConfigError when a field is where the shell would not read its quotes as quotes."""
    pieces = list(pieces)
    if all(name is None for _, name in pieces):
        return
    literal = "\0".join(literal for literal, _ in pieces)
    for construct in READ_TWICE:
        if construct in literal:
            raise ConfigError(key, text, f"fields cannot be quoted safely beside {construct}", WAY_OUT)
    shell = ShellReader()
    for literal, name in pieces:
        shell.read(literal)
        if name is not None:
            if reason := shell.refusal():
                raise ConfigError(key, text, f"{{{name}}} is {reason}", WAY_OUT)
            shell.last = "x"
    if shell.quote in ("'", '"'):
        raise ConfigError(key, text, f"the quote {shell.quote} is never closed", "Close it")


class ShellReader:
    """The state of a shell that reads text: `quote` is ', ", # (a comment) or nothing; `last` the last character."""

    def __init__(self) -> None:
        self.quote, self.last, self.escaped = "", " ", False

    def read(self, literal: str) -> None:
        for char in literal:
            if self.escaped:
                self.escaped, char = False, "x"
            elif char == "\\" and self.quote in ("", '"'):
                self.escaped = True
            elif self.quote:
                if char == ("\n" if self.quote == "#" else self.quote):
                    self.quote = ""
            elif char in "'\"" or (char == "#" and self.last in " \t\n;|&()<>"):
                self.quote = char
            self.last = char

    def refusal(self) -> str:
        """Why a field cannot follow; empty when it can."""
        if self.quote:
            return "in a comment" if self.quote == "#" else f"between {self.quote} quotes"
        return f"after {self.last}" if self.escaped or self.last == "$" else ""


def fill(pieces: Iterable[Piece], task: Mapping[str, Any], *, key: str, shell: bool) -> str:
    """The text with the task's values; raises ConfigError for a field that the task does not have."""
    filled = ""
    for literal, name in pieces:
        filled += literal
        if name is not None:
            value = as_text(lookup(task, name, key=key))
            filled += quoted(value) if shell else value
    return filled


def lookup(task: Mapping[str, Any], name: str, *, key: str) -> Any:
    """The value of a field, through columns that are mappings; raises ConfigError if there is none."""
    value: Any = task
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            has = sorted(map(str, value)) if isinstance(value, Mapping) else []
            raise ConfigError(
                key, f"{{{name}}}", "the task has no such field", f"It has: {', '.join(has) or 'no fields'}"
            )
        value = value[part]
    return value


def as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def quoted(text: str) -> str:
    """The text in quotes, also when it needs none: a plain `2` before `>` would be a file descriptor."""
    safe = shlex.quote(text)
    return safe if safe.startswith("'") else f"'{safe}'"
