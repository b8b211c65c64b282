"""Reads frozen dataclasses from plain values and reports all mistakes at once.

A dataclass is the schema of a node of settings. The type of a field, with msgspec's `Meta` for bounds, is what the
field may hold. A `Doc` in its `Annotated` says what it means. A field that is itself such a dataclass is a node
within the node; one with a `parse` of its own reads itself. msgspec checks single values. This module walks the
fields, so that one mistake hides no other, and writes messages in the terms of ConfigError.

Invariants: what `read` returns satisfies the types and bounds of its class. Nothing is converted but lists to
tuples, names to members of an enum, and whole numbers to floats. Numbers are finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec
import msgspec.inspect as inspect
from msgspec import Meta

from seamless_verl.errors import ConfigError, refuse

T = TypeVar("T")
Renames = Mapping[str, str]
"""What was renamed: an old key, or an old `key=value`, to what is to be written now."""

NotNegative: TypeAlias = Annotated[int, Meta(ge=0)]
Positive: TypeAlias = Annotated[int, Meta(ge=1)]
PositiveNumber: TypeAlias = Annotated[float, Meta(gt=0)]
NotNegativeNumber: TypeAlias = Annotated[float, Meta(ge=0)]
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Seed: TypeAlias = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]  # of sampling: what vLLM takes


@dataclass(frozen=True)
class Doc:
    """What a setting means, in one phrase of Markdown; `way_out` of a bad value, which may name the `{key}`."""

    meaning: str = ""
    way_out: str = ""


@dataclass(frozen=True)
class SettingRow:
    """One setting as a table shows it; `default` is MISSING when it must be given."""

    key: str
    default: object
    type: str
    allowed: str
    meaning: str


def read(kind: type[T], value: object, *, key: str, renamed: Renames | None = None) -> T:
    """A `kind` from a mapping of plain values, or of omegaconf's; None gives the defaults.

    Raises:
        ConfigError: one mistake. ConfigErrors: several, unknown keys first, then in the order of the fields.
    """
    mistakes: list[ConfigError] = []
    parsed = _read_node(kind, plain(value), key, renamed or {}, mistakes)
    refuse(mistakes)
    return cast(T, parsed)


def check(instance: object, *, key: str) -> None:
    """Check an instance that was made in code, for `__post_init__` of a schema; raises as `read` does."""
    mistakes: list[ConfigError] = []
    for item in _schema(type(instance)):  # type: ignore[arg-type]
        if item.node is None:
            _read_field(item, getattr(instance, item.name), f"{key}.{item.name}", {}, mistakes)
    refuse(mistakes)


def read_value(kind: Any, value: object, *, key: str, way_out: str = "") -> Any:
    """One value of the type `kind`; raises ConfigError."""
    try:
        parsed = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _mistake(kind, key, value, way_out) from error
    if isinstance(parsed, float) and not math.isfinite(parsed):
        raise _mistake(kind, key, value, way_out)
    return parsed


def plain(value: object) -> object:
    """Mappings as dicts and sequences as lists, at every depth; omegaconf's nodes are of neither type."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(item) for item in value]
    return value


def nearest(name: str, valid: Sequence[str], before: str = "", then: str = "") -> str:
    """A way out for a mistyped name: the nearest valid one when there is one, else all of them.

    Each is written with what stands `before` it in a command. `then` is another sentence.
    """
    near = get_close_matches(name, valid, n=1)
    if near:
        return f"Did you mean {before}{near[0]}? {then}".rstrip()
    return f"Valid: {', '.join(before + other for other in valid)}" + (f". {then}" if then else "")


def rows(kind: type[Any], key: str) -> Iterator[SettingRow]:
    """All settings of a schema, those of nodes within it too, in the order of the fields."""
    for item in _schema(kind):  # type: ignore[arg-type]
        inner = f"{key}.{item.name}"
        if item.node is not None and not hasattr(item.node, "parse"):
            yield from rows(item.node, inner)
            continue
        expected = Expected("list", nullable=True) if item.node is not None else Expected.of(item.hint)
        allowed = ", ".join(f"`{name}`" for name in expected.names) or expected.bounds.removeprefix("of ").removeprefix(
            "that is "
        )
        what = expected.type.removeprefix("a ") + (" or null" if expected.nullable else "")
        yield SettingRow(inner, item.default, what, allowed, item.doc.meaning)


@dataclass(frozen=True)
class _Item:
    """One field of a schema; `default` is MISSING when it must be given, `node` its dataclass when it is a node."""

    name: str
    hint: Any
    default: Any
    node: type[Any] | None
    doc: Doc

    def way_out(self, key: str) -> str:
        return self.doc.way_out.replace("{key}", key)


@cache
def _schema(kind: type[Any]) -> tuple[_Item, ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_item(item.name, hints[item.name], item.default, item.default_factory) for item in fields(kind))


def _item(name: str, hint: Any, default: Any, factory: Any) -> _Item:
    inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    options = get_args(inner) or (inner,)
    node = next((option for option in options if isinstance(option, type) and is_dataclass(option)), None)
    doc = next((part for part in getattr(hint, "__metadata__", ()) if isinstance(part, Doc)), Doc())
    return _Item(name, hint, default if factory is MISSING else factory(), node, doc)


def _read_node(kind: type[T], node: object, key: str, renamed: Renames, mistakes: list[ConfigError]) -> T | None:
    """None when the node has a mistake; all its mistakes are then in `mistakes`."""
    schema, node, before = _schema(kind), {} if node is None else node, len(mistakes)  # type: ignore[arg-type]
    valid = [item.name for item in schema]
    if not isinstance(node, Mapping):
        mistakes.append(ConfigError(key, node, "must be a node with keys", nearest("", valid)))
        return None
    mistakes += [_unknown(key, str(name), node[name], valid, renamed) for name in node if name not in valid]
    values = {}
    for item in schema:
        inner = f"{key}.{item.name}"
        if item.name in node:
            values[item.name] = _read_field(item, node[item.name], inner, renamed, mistakes)
        elif item.default is MISSING:
            way_out = item.way_out(inner) or f"Add {item.name} to {key}"
            mistakes.append(ConfigError(inner, None, "has no value", way_out))
    return None if len(mistakes) > before else _make(kind, values, mistakes)


def _make(kind: type[T], values: Mapping[str, Any], mistakes: list[ConfigError]) -> T | None:
    try:
        return kind(**values)
    except ConfigError as error:  # of its __post_init__
        mistakes += error.mistakes
        return None


def _read_field(item: _Item, value: object, key: str, renamed: Renames, mistakes: list[ConfigError]) -> Any:
    """None when the value is a mistake, which is then in `mistakes`."""
    try:
        if item.node is not None and hasattr(item.node, "parse"):
            return item.node.parse(value)
        if item.node is not None:
            return _read_node(item.node, value, key, renamed, mistakes)
        if isinstance(value, str) and f"{key}={value}" in renamed:
            raise _renamed(key, value, renamed[f"{key}={value}"])
        return read_value(item.hint, value, key=key, way_out=item.way_out(key))
    except ConfigError as error:
        mistakes += error.mistakes
        return None


def _unknown(key: str, name: str, value: object, valid: Sequence[str], renamed: Renames) -> ConfigError:
    whole = f"{key}.{name}"
    if whole in renamed:
        return _renamed(whole, value, renamed[whole])
    before = "" if "[" in key else f"{key}."  # entries of a list are not written on a command line
    return ConfigError(whole, value, "is not a known key", nearest(name, valid, before))


def _renamed(key: str, value: object, new: str) -> ConfigError:
    return ConfigError(key, value, "was renamed", f"Write {new}")


def _mistake(kind: Any, key: str, value: object, way_out: str) -> ConfigError:
    expected = Expected.of(kind)
    if expected.names:
        names = [*expected.names, *(["null"] if expected.nullable else [])]
        return ConfigError(key, value, "is not known", way_out or nearest(str(value), names))
    null = ", or null" if expected.nullable else ""
    generic = f"Set {expected.way_out.replace('{key}', key)}{null}"
    return ConfigError(key, value, f"must be {expected.text}", way_out or generic)


@dataclass(frozen=True)
class Expected:
    """What a field may hold, in words: its type, bounds or names, and how a good value is set."""

    type: str
    bounds: str = ""
    way_out: str = "{key} to one"
    names: tuple[str, ...] = ()
    nullable: bool = False

    @property
    def text(self) -> str:
        return f"{self.type} {self.bounds}".rstrip()

    @classmethod
    def of(cls, kind: Any) -> Expected:
        """Of a type with its `Annotated`; one that has no words here is an error of the schema."""
        found, names = inspect.type_info(kind), _literals(kind)
        while isinstance(found, inspect.Metadata):
            found = found.type
        if not isinstance(found, inspect.UnionType):
            return replace(_expected(found), names=names or _expected(found).names)
        members = [_expected(member) for member in found.types if not isinstance(member, inspect.NoneType)]
        nullable = len(members) < len(found.types)
        if len(members) > 1:
            return cls(" or ".join(member.type for member in members), nullable=nullable)
        (only,) = members
        return cls(only.type, only.bounds, only.way_out, names or only.names, nullable)


def _literals(kind: Any) -> tuple[str, ...]:
    """The names of a Literal as they were declared; msgspec sorts them."""
    if get_origin(kind) is Literal:
        return tuple(map(str, get_args(kind)))
    return next((names for inner in get_args(kind) if (names := _literals(inner))), ())


def _expected(found: Any) -> Expected:
    match found:
        case inspect.Metadata():
            return _expected(found.type)
        case inspect.BoolType():
            return Expected("true or false", way_out="{key}=true or {key}=false")
        case inspect.IntType():
            way_out = "{key} to one" if found.ge is None else f"{{key}}={found.ge} or more"
            return Expected("a whole number", _bounds(found), way_out)
        case inspect.FloatType():
            return Expected("a number", _bounds(found))
        case inspect.StrType():
            return Expected("a text", "that is not empty" if found.min_length else "")
        case inspect.EnumType(cls=kind):
            return Expected("a name", names=tuple(str(member.value) for member in kind))
        case inspect.LiteralType(values=values):
            return Expected("a name", names=tuple(map(str, values)))
        case inspect.DictType(value_type=inner):
            return Expected(f"a node of {_plural(inner)}")
        case inspect.ListType(item_type=inner) | inspect.VarTupleType(item_type=inner):
            return Expected(f"a list of {_plural(inner)}")
    raise NotImplementedError(f"no words for {found}")


def _plural(found: Any) -> str:
    members = found.types if isinstance(found, inspect.UnionType) else (found,)
    return " or ".join(f"{_expected(member).type.removeprefix('a ')}s" for member in members)


def _bounds(found: Any) -> str:
    """Of a number: `above 0`, `above 0, at most 1`, `of at least 0` or `from -2 to 2`; nothing without bounds."""
    if found.ge is not None and found.le is not None:
        return f"from {found.ge:g} to {found.le:g}"
    if found.gt is not None:
        return f"above {found.gt:g}" + ("" if found.le is None else f", at most {found.le:g}")
    return "" if found.ge is None else f"of at least {found.ge:g}"
