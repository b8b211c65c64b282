"""Names in the package: one class name for one meaning, and none of the private words that were given up."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "seamless_verl"
GIVEN_UP_WORDS = """
door straight seam untold tape nearby trunk exchange refusals replying journalled restoring beyond
bell ring rung shelf doorstep borrowed contact seek knock puts parcel answers answered planelink
open_door kin carried notes noted roster freeze thaw stand_still parted returned go_on mend mending
obey met told tell handed refit refitted book rewriting fate freshness feeding collector startup
concurrently standstill sending cover books fitting misfit misfits zygote before_helpers going_first
pace stint face said heard hear comes mine theirs house storm
"""
"""Words that a reader of verl and vLLM does not know in the sense they had here."""
FIELD_TERMS = {
    "seamless_verl/journal/stored.py": {"handed"},  # a stage by the name under which it is stored
    "seamless_verl/journal/writer.py": {"handed"},
    "seamless_verl/resources/lending/marginal.py": {"pace"},  # a key of saved states
    "seamless_verl/replica/engine_source.py": {"collector"},  # vLLM's RequestOutputCollector
    "seamless_verl/replica/running_request.py": {"collector"},
    "seamless_verl/gateway/server.py": {"startup"},  # uvicorn's method
}


def defined_names(tree: ast.AST) -> Iterator[str]:
    """Of classes, functions, parameters, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


def test_no_given_up_word_is_a_name() -> None:
    found = set()
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE.parent)
        names = {*path.with_suffix("").parts, *defined_names(ast.parse(file.read_text()))}
        words = {name.strip("_").lower() for name in names} - FIELD_TERMS.get(path.as_posix(), set())
        found |= {(path.as_posix(), word) for word in words & set(GIVEN_UP_WORDS.split())}
    assert not found


def test_a_class_name_has_one_meaning() -> None:
    classes = Counter(
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert not {name: count for name, count in classes.items() if count > 1}
