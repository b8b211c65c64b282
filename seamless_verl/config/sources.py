"""Finds the names that a Python file defines at its top level, from its source: nothing is run or imported.

Running user code could take minutes, import torch, or start something. Names that only running would show
(`from x import *`, a module's `__getattr__`, writes to `globals()`) are taken to exist.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from seamless_verl.errors import ConfigError

Names = frozenset[str]
LISTED = 12  # names in a message, at most


def find_module(dotted: str) -> tuple[ModuleSpec | None, list[str]]:
    """The innermost module of a dotted name, and the parts after it; None when its first part is no module."""
    first, *rest = dotted.split(".")
    try:
        spec = find_spec(first)
    except (ImportError, ValueError):  # an empty part, or a module without a spec
        return None, rest
    while spec is not None and rest and spec.submodule_search_locations is not None:
        inner = PathFinder.find_spec(f"{spec.name}.{rest[0]}", list(spec.submodule_search_locations))
        if inner is None:
            break
        spec, rest = inner, rest[1:]
    return spec, rest


def check_name(key: str, value: str, place: str, file: str | Path, name: str) -> None:
    """ConfigError for a `name` that `file` does not define, or a file that is not Python."""
    names = names_of(key, value, Path(file))
    if names is None or name in names:
        return
    public = sorted(other for other in names if not other.startswith("_"))
    near = get_close_matches(name, public, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise ConfigError(key, value, f"{place} has no {name!r}", f"{hint}It has: {_listed(Path(file), public)}")


def check_call(key: str, value: str, file: str | Path, name: str, given: Sequence[str]) -> None:
    """ConfigError for a function of `file` that does not take these arguments, by place.

    Nothing where the name is none of a plain function: a decorator may change what it takes.
    """
    body = ast.parse(Path(file).read_text(encoding="utf-8")).body
    made = [statement for statement in body if name in _defined([statement])]
    if not made or not isinstance(made[-1], (ast.FunctionDef, ast.AsyncFunctionDef)) or made[-1].decorator_list:
        return
    takes = made[-1].args
    places = len(takes.posonlyargs) + len(takes.args)
    by_name = [one.arg for one, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if default is None]
    needed, count = places - len(takes.defaults), len(given)
    if needed <= count and (count <= places or takes.vararg is not None) and not by_name:
        return
    most = "at least " if needed > count and needed != places else "at most " if needed < places < count else ""
    number = needed if needed > count else places
    wants = f"needs {' and '.join(by_name)} by name" if by_name else f"takes {most}{_arguments(number)}"
    reason = f"{name}({ast.unparse(takes)}) {wants}, and {count} are given: {' and '.join(given)}"
    raise ConfigError(key, value, reason, f"Write it as {name}({', '.join(given)})")


def _arguments(number: int) -> str:
    return f"{number or 'no'} argument{'' if number == 1 else 's'}"


def check_dotted(key: str, value: str, dotted: str, way_out: str) -> None:
    """ConfigError for a dotted name, `package.module.name`, whose module or name does not exist."""
    spec, rest = find_module(dotted)
    if spec is None:
        raise ConfigError(key, value, f"there is no module {dotted.split('.')[0]!r}", way_out)
    if spec.origin is None or not spec.origin.endswith(".py") or not rest:
        if not rest:
            raise ConfigError(key, value, "is a module", f"Name something in it: {dotted}.<name>")
        return  # compiled, or a namespace package: it has no source to read
    names = names_of(key, value, Path(spec.origin))
    if names is not None and rest[0] not in names and (rest[1:] or not names):
        _check_in_package(key, value, spec, rest[0], way_out)
    check_name(key, value, f"the module {spec.name}", spec.origin, rest[0])


def _check_in_package(key: str, value: str, spec: ModuleSpec, name: str, way_out: str) -> None:
    """ConfigError that lists a package's modules, where the `name` is none of them; nothing for a plain module."""
    if spec.submodule_search_locations is None:
        return
    modules = sorted(module.name for module in iter_modules(list(spec.submodule_search_locations)))
    near = get_close_matches(name, modules, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    listed = f"It has: {_shortened(modules)}. " if modules else ""
    raise ConfigError(key, value, f"the package {spec.name} has no module {name!r}", f"{hint}{listed}{way_out}")


def names_of(key: str, value: str, file: Path) -> Names | None:
    """Names at the file's top level; None when only running it would show them. ConfigError for no Python."""
    try:
        source = file.read_text(encoding="utf-8")
        body = ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise ConfigError(key, value, f"{file} is not Python: {error}", "Correct the file") from error
    except OSError as error:
        raise ConfigError(key, value, f"{file} cannot be read: {error.strerror}", "Allow it to be read") from error
    names = frozenset(_defined(body))
    return None if {"*", "__getattr__"} & names or "globals()" in source else names


def _listed(file: Path, public: list[str]) -> str:
    """For a message: the functions and classes, or all public names where the file has none."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    made = {node.name for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, kinds)}
    return _shortened([name for name in public if name in made] or public)


def _shortened(names: list[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return (", ".join(names[:LISTED]) or "nothing") + more


def _defined(body: Iterable[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement.name
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.split(".")[0] for alias in statement.names)
        else:  # an assignment, or a block such as `if` or `try`
            for node in ast.iter_child_nodes(statement):
                yield from _names(node)


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.stmt):
        yield from _defined([node])
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _names(child)
