"""A plan as JSON and back: the same plan, or an error that says which field is not as it should be."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from enum import Enum
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from seamless_verl.errors import ConfigError
from seamless_verl.resources.plan import Plan

T = TypeVar("T")
FORMAT = 1
WAY_OUT = "Use what `seamless-verl plan --json` of this release wrote"


def plan_to_json(plan: Plan) -> str:
    return json.dumps({"format": FORMAT, "plan": _plain(plan)}, indent=1)


def plan_from_json(text: str) -> Plan:
    """Raises ConfigError for what is no plan of this format."""
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise ConfigError("plan", text[:40], f"is not JSON: {error}", WAY_OUT) from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        found = tree.get("format") if isinstance(tree, dict) else None
        raise ConfigError("plan.format", found, f"is not the format {FORMAT}", WAY_OUT)
    plan = _read(Plan, tree.get("plan"), "plan")
    assert isinstance(plan, Plan)
    plan.check_integrity()
    return plan


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def _read(kind: Any, value: Any, key: str) -> Any:
    """The value as `kind`: a dataclass, an enum, a tuple, a union with None, or a plain type."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise ConfigError(key, value, f"must have the fields {', '.join(hints)}", WAY_OUT)
        return kind(**{name: _read(hint, value[name], f"{key}.{name}") for name, hint in hints.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        return _read_tuple(get_args(kind), value, key)
    if get_args(kind):  # a union of plain types
        plain = get_args(kind)
        return None if value is None and NoneType in plain else _read_plain(plain, value, key)
    if issubclass(kind, Enum):
        if value not in [member.value for member in kind]:
            raise ConfigError(key, value, f"is no {kind.__name__}", WAY_OUT)
        return kind(value)
    return _read_plain((kind,), value, key)


def _read_tuple(kinds: tuple[Any, ...], value: Any, key: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ConfigError(key, value, "must be a list", WAY_OUT)
    each = [kinds[0]] * len(value) if kinds[-1] is Ellipsis else list(kinds)
    if len(each) != len(value):
        raise ConfigError(key, value, f"must have {len(each)} entries", WAY_OUT)
    return tuple(_read(kind, item, f"{key}[{i}]") for i, (kind, item) in enumerate(zip(each, value, strict=True)))


def _read_plain(kinds: tuple[Any, ...], value: Any, key: str) -> Any:
    if type(value) not in kinds:
        names = " or ".join(kind.__name__ for kind in kinds if kind is not NoneType)
        raise ConfigError(key, value, f"must be {names}", WAY_OUT)
    return value
