"""docs/architecture.md names files and functions that are there, and its walks are as short as they should be."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from support.pages import DOCS
from support.paths import ROOT

PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
FILE = re.compile(r"`([\w/]+\.py)`")
NAMED = re.compile(r"`([\w/]+\.py)`: ((?:`[\w.]+`(?:, |,? and )?)+)")
NAMES = sorted({(file, name) for file, names in NAMED.findall(PAGE) for name in re.findall(r"`([\w.]+)`", names)})
MOST_QUESTIONS, MOST_HOPS = 25, 28


@pytest.mark.parametrize("file", sorted(set(FILE.findall(PAGE))))
def test_a_file_is_there(file: str) -> None:
    assert found(file)


@pytest.mark.parametrize("file, name", NAMES)
def test_a_name_is_in_its_file(file: str, name: str) -> None:
    assert name in defined(found(file))


def test_the_walk_of_a_token_is_as_short_as_it_should_be() -> None:
    walk = PAGE.partition("## 4. The walk of a token")[2].partition("## 5.")[0]
    hops = re.findall(r"^(\d+)\. `", walk, re.MULTILINE)
    assert hops == [str(number) for number in range(1, len(hops) + 1)] and len(hops) <= MOST_HOPS
    assert f"**{len(hops)} hops in " in walk


def test_the_table_has_the_questions_of_a_reader() -> None:
    [table] = re.findall(r"^\| question \| file: function \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert len(table.splitlines()) <= MOST_QUESTIONS


def found(file: str) -> Path:
    [path] = [path for path in (ROOT / "seamless_verl" / file, ROOT / file) if path.is_file()]
    return path


@cache
def defined(file: Path) -> set[str]:
    """Its classes, functions and constants, and `Class.member`."""
    return set(names_of(ast.parse(file.read_text(encoding="utf-8")), ""))


def names_of(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + child.name
            if prefix:
                yield child.name  # a method that the page gives without its class
            if isinstance(child, ast.ClassDef):
                yield from names_of(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))
        else:
            yield from names_of(child, prefix)
