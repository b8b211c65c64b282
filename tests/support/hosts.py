"""How the contract tests look at a host: what its functions take, and what its objects hold."""

from __future__ import annotations

import ast
import inspect
import textwrap
from importlib.metadata import version
from typing import Any

from seamless_verl.platform.adaptation import Adaptation, plain_class

VLLM = ".".join(version("vllm").split(".")[:2])  # the stack under test: 0.29, or 0.24, which verl pins
HOSTS = {"verl": "verl 0.9.1", "vllm": f"vllm {VLLM}.0", "ray": "ray 2.60.0", "transfer_queue": "TransferQueue 0.1.11"}
TRACING = "_ray_trace_ctx"  # which Ray adds to the methods of whatever becomes an actor


def found(symbol: str, user: str) -> Any:
    """The object of this symbol; raises HostMovedError, which names it, when it is gone."""
    host = symbol.partition(":")[0].partition(".")[0]
    return Adaptation(user, symbol, HOSTS.get(host, host), "overridden, called or imported").find()


def signature(function: Any) -> inspect.Signature:
    """As it is written, without decorators."""
    whole = inspect.signature(inspect.unwrap(function))
    return whole.replace(parameters=[one for one in whole.parameters.values() if one.name != TRACING])


def parameters(function: Any) -> str:
    """Names in order, `*` where the keyword-only ones begin."""
    words: list[str] = []
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    for one in signature(function).parameters.values():
        if one.kind is one.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(stars.get(one.kind, "") + one.name)
    return " ".join(words)


def attributes(actor_or_class: Any) -> set[str]:
    """What an object of the class has: all that it and its host's bases define, annotate, or assign to `self`."""
    cls = plain_class(actor_or_class)
    host = cls.__module__.partition(".")[0]
    ours = [one for one in cls.__mro__ if one.__module__.partition(".")[0] == host]
    return {name for one in ours for name in (*vars(one), *inspect.get_annotations(one), *_assigned(one))}


def listed(table: dict[str, str]) -> list[tuple[str, str]]:
    """(owner, name) for every word of a table of names by owner."""
    return [(owner, name) for owner, names in table.items() for name in names.split()]


def _assigned(cls: type) -> set[str]:
    source = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    stored = (node for node in ast.walk(source) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}
