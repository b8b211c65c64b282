"""The documents: their pages, the shell commands and the settings that they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.paths import ROOT

DOCS = ROOT / "docs"
CURRENT = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "patches/README.md")),
    *sorted(DOCS.glob("*.md")),
    ROOT / "tests/gpu/README.md",
    *sorted((ROOT / "recipes").rglob("*.md")),
    *sorted((ROOT / "seamless_verl").rglob("*.md")),
]
"""What says how things are now: all but the changelog."""
PAGES = [*CURRENT, ROOT / "CHANGELOG.md"]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
INLINE_COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*(?:seamless-verl\b|python3? |scripts/\w|recipes/[\w/]+\.sh\b)")
PLACEHOLDER = re.compile(r"<[a-z][^<>\n]*>|(?<!\S)\.\.\.(?!\S)")  # `<your overrides>`, and what a reader fills in
BETWEEN = {"&&", "||", "|", ";"}
VARIABLE = re.compile(r"\w+=")


@dataclass(frozen=True)
class Command:
    """A command of a page: its words without variables before it and redirections behind; `whole` in a block."""

    page: str
    words: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands_of(page: Path) -> Iterator[Command]:
    """The commands of its shell blocks, and of its text and tables, where a command may be cut short."""
    text, name = page.read_text(encoding="utf-8"), page_name(page)
    for kind, block in FENCE.findall(text):
        if kind == "bash":
            yield from (Command(name, words, True) for words in commands_in(block))
    for code in INLINE.findall(FENCE.sub("", text)):
        if INLINE_COMMAND.match(code):
            yield from (Command(name, words, False) for words in commands_in(code.replace("\n", " ")))


def commands_in(block: str) -> Iterator[tuple[str, ...]]:
    """The commands of a script; variables that it sets are put in where they are used."""
    variables: dict[str, str] = {}
    for line in whole_lines(PLACEHOLDER.sub("", block)):
        words = shlex.split(replaced(line, variables), comments=True)
        if words and all(VARIABLE.match(word) for word in words):
            variables |= dict(word.split("=", 1) for word in words)
            continue
        for part in parts(words):
            while part and VARIABLE.match(part[0]):
                del part[0]
            if part:
                yield tuple(part)


def replaced(line: str, variables: dict[str, str]) -> str:
    for name, value in variables.items():
        line = re.sub(rf"\${name}\b", lambda _, value=value: value, line)
    return line


def whole_lines(block: str) -> Iterator[str]:
    """Lines, joined where one ends in a backslash or within quotes."""
    begun = ""
    for line in block.splitlines():
        begun += line
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        try:
            shlex.split(begun, comments=True)
        except ValueError:
            begun += "\n"
            continue
        yield begun
        begun = ""
    assert not begun, f"a quote is not closed: {begun}"


def parts(words: list[str]) -> Iterator[list[str]]:
    """The commands between `&&`, `|` and `;`, without redirections."""
    part: list[str] = []
    redirected = False
    for word in words:
        if word in BETWEEN:
            yield part
            part = []
        elif re.match(r"\d?[<>]", word):
            redirected = len(word.lstrip("012")) == 1 or word.endswith(">")
            continue
        elif not redirected:
            part.append(word)
        redirected = False
    yield part
