"""Reads settings with pydantic, and says all mistakes at once as ConfigErrors: each with key, value and way out.

A dataclass that derives from `SettingsNode` is the schema of a node: types and bounds are those of its fields, and the
text under a field is its meaning. Nothing is converted but lists to tuples, names to members of an enum, and whole
numbers to floats: values are read as strict JSON. What a message or a table says of a field is read from its JSON
schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar, cast, get_type_hints

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import ConfigDict, TypeAdapter, ValidationError

from seamless_verl.errors import ConfigError, refuse

T = TypeVar("T")
NotNegative: TypeAlias = Annotated[int, Ge(0)]
Positive: TypeAlias = Annotated[int, Ge(1)]
PositiveNumber: TypeAlias = Annotated[float, Gt(0)]
NotNegativeNumber: TypeAlias = Annotated[float, Ge(0)]
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]
Text: TypeAlias = Annotated[str, MinLen(1)]
Seed: TypeAlias = Annotated[int, Ge(-(1 << 63)), Le((1 << 63) - 1)]  # of sampling: what vLLM takes
UNKNOWN = "unexpected_keyword_argument"


class SettingsNode:
    """The base of a dataclass that is the schema of a node of settings."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class SettingRow:
    """One setting as a table shows it; `default` is MISSING when it must be given."""

    key: str
    default: object
    type: str
    allowed: str
    meaning: str


def read(kind: type[T], value: object, *, key: str) -> T:
    """A `kind` from a mapping of plain values, or of omegaconf's; None gives the defaults, also of a node within it.

    Raises:
        ConfigError: one mistake. ConfigErrors: several, unknown keys first, then in the order of the fields.
    """
    schema: Any = kind
    given = _filled(_Schema.of(schema), plain(value))
    try:
        return cast(T, _adapter(schema).validate_json(json.dumps(given, default=str), strict=True))
    except ValidationError as error:
        found = sorted(error.errors(include_url=False), key=_order)
        mistakes: dict[str, ConfigError] = {}  # of a union there is an error for each of its types
        for one in found:
            for mistake in _mistakes(kind, one, given, key):
                mistakes.setdefault(mistake.key, mistake)
        refuse(list(mistakes.values()))
        raise


def _order(error: Any) -> int:
    return len(error["loc"]) if error["type"] == UNKNOWN else 99


def check(instance: object, *, key: str) -> None:
    """Check an instance that was made in code, for `__post_init__` of a dataclass; raises as `read` does."""
    mistakes, hints = list[ConfigError](), _hints(type(instance))  # type: ignore[arg-type]
    for item in fields(instance):  # type: ignore[arg-type]
        try:
            read_value(hints[item.name], getattr(instance, item.name), key=f"{key}.{item.name}")
        except ConfigError as error:
            mistakes.append(error)
    refuse(mistakes)


def read_value(kind: Any, value: object, *, key: str, way_out: str = "") -> Any:
    """One value of the type `kind`; raises ConfigError."""
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        raise _wrong(_Schema.of(kind), key, value, way_out) from error


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
    schema: Any = kind
    yield from _rows(_Schema.of(schema), key)


def _rows(node: _Schema, key: str) -> Iterator[SettingRow]:
    for name, item in node.items().items():
        if item.items():
            yield from _rows(item, f"{key}.{name}")
            continue
        allowed = ", ".join(f"`{other}`" for other in item.names) or item.bounds.removeprefix("of ")
        kinds = item.type.removeprefix("a ") + (" or null" if item.nullable else "")
        default = item.own.get("default", MISSING)
        yield SettingRow(f"{key}.{name}", default, kinds, allowed.removeprefix("that is "), item.meaning)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind, config=None if isinstance(kind, type) else ConfigDict(allow_inf_nan=False))


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _filled(node: _Schema, value: Any) -> Any:
    """The value, with an empty node for each that is null."""
    items = node.items()
    if not items:
        return value
    if not isinstance(value, Mapping):
        return {} if value is None else value
    return {name: _filled(items[name], inner) if name in items else inner for name, inner in value.items()}


def _mistakes(kind: Any, error: Any, value: Any, key: str) -> Iterator[ConfigError]:
    """What one of pydantic's errors says, of the innermost setting that it is about."""
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, ConfigError):  # of a type that reads itself, or of a `__post_init__`
        yield from raised.mistakes
        return
    node, before = _Schema.of(kind), ""
    for part in error["loc"]:
        items = node.items()
        if not items:
            break
        before, key = key, f"{key}.{part}"
        value = value.get(part) if isinstance(value, Mapping) else None
        if part not in items:
            # Entries of a list are not written on a command line.
            way_out = nearest(str(part), list(items), "" if "[" in before else f"{before}.")
            yield ConfigError(key, value, "is not a known key", way_out)
            return
        node = items[part]
    if error["type"] == "missing":
        yield ConfigError(key, None, "has no value", node.way_out(key) or f"Add {key.rpartition('.')[2]} to {before}")
    else:
        yield _wrong(node, key, value)


def _wrong(node: _Schema, key: str, value: object, way_out: str = "") -> ConfigError:
    if node.items():
        return ConfigError(key, value, "must be a node with keys", nearest("", list(node.items())))
    way_out = way_out or node.way_out(key)
    if node.names:
        names = [*node.names, *(["null"] if node.nullable else [])]
        return ConfigError(key, value, "is not known", way_out or nearest(str(value), names))
    null = ", or null" if node.nullable else ""
    generic = f"Set {node.example.replace('{key}', key)}{null}"
    return ConfigError(key, value, f"must be {node.type} {node.bounds}".rstrip(), way_out or generic)


@dataclass(frozen=True)
class _Schema:
    """A part of a JSON schema, in words: `own` is the part, `found` what it refers to, `root` has the definitions."""

    own: Mapping[str, Any]
    root: Mapping[str, Any]

    @staticmethod
    @cache
    def of(kind: Any) -> _Schema:
        root = _adapter(kind).json_schema()
        for base in kind.__mro__[1:] if isinstance(kind, type) else ():  # pydantic reads the class's own texts alone
            for name, item in _Schema.of(base).items().items() if is_dataclass(base) else ():
                root["properties"][name].setdefault("description", item.meaning)
        return _Schema(root, root)

    @property
    def found(self) -> Mapping[str, Any]:
        """The schema without references, and without null."""
        options = [one for one in self.own.get("anyOf", [self.own]) if one.get("type") != "null"]
        return self._resolved(options[0]) if len(options) == 1 else {"anyOf": options}

    def _resolved(self, part: Mapping[str, Any]) -> Mapping[str, Any]:
        name = part.get("$ref", "").rpartition("/")[2]
        return cast(Mapping[str, Any], self.root["$defs"][name]) if name else part

    def items(self) -> dict[str, _Schema]:
        """The fields of a node, by name; none of a value."""
        return {name: _Schema(inner, self.root) for name, inner in self.found.get("properties", {}).items()}

    @property
    def meaning(self) -> str:
        return " ".join(str(self.own.get("description", "")).split())

    @property
    def nullable(self) -> bool:
        return any(one.get("type") == "null" for one in self.own.get("anyOf", ()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.found.get("enum", [self.found["const"]] if "const" in self.found else ())))

    @property
    def type(self) -> str:
        return self._type(self.found)

    def _type(self, part: Mapping[str, Any]) -> str:
        if "anyOf" in part:
            return " or ".join(self._type(self._resolved(one)) for one in part["anyOf"])
        match part.get("type"):
            case "string":
                return "a name" if self.names else "a text"
            case "array":
                return f"a list of {self._plural(part['items'])}" if part.get("items") else "a list"
            case "object":
                return f"a node of {self._plural(part.get('additionalProperties') or {})}"
        return {"boolean": "true or false", "integer": "a whole number", "number": "a number"}.get(
            str(part.get("type")), "a value"
        )

    def _plural(self, part: Mapping[str, Any]) -> str:
        return " or ".join(f"{self._type(one).removeprefix('a ')}s" for one in part.get("anyOf", [part]))

    @property
    def bounds(self) -> str:
        """Of a number: `above 0`, `above 0, at most 1`, `of at least 0` or `from -2 to 2`; nothing without bounds."""
        found = self.found
        least, most, above = (found.get(name) for name in ("minimum", "maximum", "exclusiveMinimum"))
        if found.get("minLength"):
            return "that is not empty"
        if least is not None and most is not None:
            return f"from {least:g} to {most:g}"
        if above is not None:
            return f"above {above:g}" + ("" if most is None else f", at most {most:g}")
        return "" if least is None else f"of at least {least:g}"

    @property
    def example(self) -> str:
        """How a good value is set."""
        if self.found.get("type") == "boolean":
            return "{key}=true or {key}=false"
        least = self.found.get("minimum") if self.found.get("type") == "integer" else None
        return "{key} to one" if least is None else f"{{key}}={least} or more"

    def way_out(self, key: str) -> str:
        """The way out of a bad value that the field has of its own; else empty."""
        return str(self.own.get("way_out", "")).replace("{key}", key)


def way_out(text: str) -> Any:
    """For a field's `Annotated`: the way out of a bad value, which may name the `{key}`."""
    from pydantic import Field

    return Field(json_schema_extra={"way_out": text})
