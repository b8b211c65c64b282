"""Names of metrics: those that docs/metrics.md lists, and those that the code has, found in its source.

A part of a name that is computed is `*` in what the source shows, and `<kind>` on the page, whose row lists its values.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path

from support.pages import DOCS
from support.paths import ROOT

PAGE = DOCS / "metrics.md"
VERLS = "verl's own that matter here"
PACKAGE = ROOT / "seamless_verl"
READERS = (
    *("cli", "tiny", "tools"),
    *("runtime/step_metrics.py", "trainer/step_log.py", "trainer/prometheus.py"),
)
"""What reads metrics, or has nothing to do with them."""
NAME = re.compile(r"[a-z_]+(/([a-z0-9_]|\*)+)+")
ROW = re.compile(r"^\| (`.+?`(?:, `.+?`)*) \| (.+?) \| (.+) \|$", re.MULTILINE)
VALUES = re.compile(r"`(<\w+>)`: ((?:`\w+`(?: \([^)]*\))?(?:, )?)+)")


def listed(*, of_verl: bool = False) -> set[str]:
    """The names on the page, with their values put in; what a row does not list stays in brackets."""
    ours, found, verls = PAGE.read_text(encoding="utf-8").partition(f"\n## {VERLS}\n")
    assert found, f"{PAGE.name} has no section {VERLS!r}"
    return {name for names, meaning in rows(verls if of_verl else ours) for name in put_in(names, meaning)}


def rows(text: str) -> list[tuple[list[str], str]]:
    return [(re.findall(r"`(.+?)`", names), meaning) for names, _, meaning in ROW.findall(text)]


def put_in(names: list[str], meaning: str) -> Iterator[str]:
    values = {word: re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", found)) for word, found in VALUES.findall(meaning)}
    for name in names:
        words = [word for word in re.findall(r"<\w+>", name) if word in values]
        for chosen in product(*(values[word] for word in words)):
            filled = name
            for word, value in zip(words, chosen, strict=True):
                filled = filled.replace(word, value)
            yield filled


def unlisted(names: Collection[str]) -> set[str]:
    """Of the names that a run logged, those with a first part of ours that the page does not list."""
    known = listed()
    ours = {name.partition("/")[0] for name in known} - {"actor", "critic", "training"}
    patterns = [re.compile(re.sub(r"<\w+>", "[^/]+", name)) for name in known]
    own = {name for name in names if name.partition("/")[0] in ours}
    return {name for name in own if not any(pattern.fullmatch(name) for pattern in patterns)}


@cache
def in_source() -> set[str]:
    """What in the source is shaped like a name of a metric."""
    files = (file for file in PACKAGE.rglob("*.py") if not is_reader(file.relative_to(PACKAGE).as_posix()))
    return {text for file in files for text in texts_of(file) if NAME.fullmatch(text)}


def is_reader(path: str) -> bool:
    return any(path == reader or path.startswith(f"{reader}/") for reader in READERS)


def texts_of(file: Path) -> Iterator[str]:
    """The texts in the code, with constants of modules put in, and what a worker adds to its `metrics`."""
    tree, names = parsed(file), constants(file)
    within = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=values):
                yield "".join(part_of(value, names) for value in values)
            case ast.Constant(value=str(text)) if node not in within:
                yield text
            case ast.Subscript(ast.Subscript(slice=ast.Constant("metrics")), ast.Constant(name)):
                yield f"actor/{name}"


def part_of(value: ast.expr, names: Mapping[str, str]) -> str:
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=ast.Name(id=name)):
            return names.get(name, "*")
    return "*"


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def constants(file: Path) -> Mapping[str, str]:
    """The texts that names of the module stand for, its own and imported ones."""
    found: dict[str, str] = {}
    for node in parsed(file).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                found[name] = text
            case ast.ImportFrom(module=str(module), names=imported) if module.startswith(f"{PACKAGE.name}."):
                path = (ROOT / module.replace(".", "/")).with_suffix(".py")
                of_module = constants(path) if path.is_file() else {}
                found |= {one.name: of_module[one.name] for one in imported if one.name in of_module}
    return found
