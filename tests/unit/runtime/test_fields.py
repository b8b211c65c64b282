"""The reader of settings: every mistake at once, each with key, value, reason and way out."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Le
from omegaconf import OmegaConf
from pydantic import PlainValidator, WithJsonSchema

from seamless_verl.errors import ConfigError, ConfigErrors
from seamless_verl.runtime import fields
from seamless_verl.runtime.fields import NotNegative, Positive, PositiveNumber, SettingRow, SettingsNode, Text, way_out


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner(SettingsNode):
    size: Positive | None = None
    share: Annotated[float, Ge(0), Le(1)] = 0.5


def parse(node: object) -> str | None:
    if node == "bad":
        raise ConfigError("x.own[3]", node, "is bad", "Write a good one")
    return None if node is None else str(node)


Own = Annotated[str | None, PlainValidator(parse), WithJsonSchema({"anyOf": [{"type": "array"}, {"type": "null"}]})]


@dataclass(frozen=True)
class Outer(SettingsNode):
    name: Text
    """What it is called."""
    count: NotNegative = 1
    """How
    many."""
    limit_s: Annotated[PositiveNumber | None, way_out("Set {key}=60, or null")] = None
    colour: Colour = Colour.RED
    how: Literal["fast", "slow"] = "fast"
    on: bool = False
    words: tuple[str, ...] = ()
    line: str | tuple[str | int, ...] = ""
    variables: dict[str, str] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    own: Own = None


GOOD = {"name": "a", "count": 0, "limit_s": 3, "colour": "blue", "how": "slow", "on": True, "words": ["b", "c"]}
GOOD |= {"line": ["d", 1], "variables": {"E": "f"}, "inner": {"size": 2}, "own": "g"}


@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_values_are_read(make: Any) -> None:
    read = fields.read(Outer, make(GOOD), key="x")
    expected = Outer("a", 0, 3.0, Colour.BLUE, "slow", True, ("b", "c"), ("d", 1), {"E": "f"}, Inner(2), "g")
    assert read == expected and read.colour is Colour.BLUE and isinstance(read.limit_s, float)


def test_what_is_left_out_or_null_has_its_default() -> None:
    assert fields.read(Outer, {"name": "a", "inner": None, "limit_s": None, "own": None}, key="x") == Outer("a")
    assert fields.read(Inner, None, key="x") == Inner()


@pytest.mark.parametrize(
    ("name", "value", "reason", "way_out"),
    [
        ("name", "", "must be a text that is not empty", "Set x.name to one"),
        ("name", None, "must be a text that is not empty", "Set x.name to one"),
        ("count", -1, "must be a whole number of at least 0", "Set x.count=0 or more"),
        ("count", True, "must be a whole number of at least 0", "Set x.count=0 or more"),
        ("count", 1.0, "must be a whole number of at least 0", "Set x.count=0 or more"),
        ("count", "1", "must be a whole number of at least 0", "Set x.count=0 or more"),
        ("count", None, "must be a whole number of at least 0", "Set x.count=0 or more"),
        ("limit_s", 0, "must be a number above 0", "Set x.limit_s=60, or null"),
        ("limit_s", math.inf, "must be a number above 0", "Set x.limit_s=60, or null"),
        ("limit_s", math.nan, "must be a number above 0", "Set x.limit_s=60, or null"),
        ("colour", "rad", "is not known", "Did you mean red?"),
        ("colour", ["red"], "is not known", "Did you mean red?"),
        ("how", "slowly", "is not known", "Did you mean slow?"),
        ("on", 1, "must be true or false", "Set x.on=true or x.on=false"),
        ("words", "b", "must be a list of texts", "Set x.words to one"),
        ("words", ["b", 1], "must be a list of texts", "Set x.words to one"),
        ("line", [1.5], "must be a text or a list of texts or whole numbers", "Set x.line to one"),
        ("variables", {"E": 1}, "must be a node of texts", "Set x.variables to one"),
        ("inner", 3, "must be a node with keys", "Valid: size, share"),
        ("colours", 3, "is not a known key", "Did you mean x.colour?"),
    ],
)
def test_a_mistake_has_key_value_reason_and_way_out(name: str, value: object, reason: str, way_out: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fields.read(Outer, {"name": "a"} | {name: value}, key="x")
    error = caught.value
    assert not isinstance(error, ConfigErrors) and error.mistakes == (error,)
    assert (error.key, error.reason) == (f"x.{name}", reason) and repr(error.value) == repr(value)
    assert error.way_out.startswith(way_out)


def test_all_mistakes_come_at_once_and_survive_pickling() -> None:
    bad = {"nmae": "a", "count": -1, "inner": {"size": 0, "share": 2, "shape": 1}, "own": "bad", "on": "yes"}
    with pytest.raises(ConfigErrors) as caught:
        fields.read(Outer, bad, key="x")
    error = caught.value
    keys = ["x.nmae", "x.inner.shape", "x.name", "x.count", "x.on", "x.inner.size", "x.inner.share", "x.own[3]"]
    assert [mistake.key for mistake in error.mistakes] == keys
    assert str(error).splitlines() == [str(mistake) for mistake in error.mistakes]
    copied = pickle.loads(pickle.dumps(error))
    assert (copied.key, copied.value, str(copied)) == ("x.nmae", "a", str(error))


def test_names_within_a_list_are_suggested_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        fields.read(Inner, {"sizes": 1}, key="x[0]")
    assert (caught.value.key, caught.value.way_out) == ("x[0].sizes", "Did you mean size?")


@dataclass(frozen=True)
class Checked(SettingsNode):
    name: Text = "a"
    count: NotNegative = 1

    def __post_init__(self) -> None:
        fields.check(self, key="y")


def test_an_instance_that_was_made_in_code_is_checked() -> None:
    with pytest.raises(ConfigErrors) as caught:
        Checked("", count=-1)
    assert [mistake.key for mistake in caught.value.mistakes] == ["y.name", "y.count"]
    assert fields.read(Checked, {"count": 2}, key="x") == Checked("a", 2)
    with pytest.raises(ConfigErrors) as caught:
        fields.read(Checked, {"count": -1, "more": 1}, key="x")
    assert [mistake.key for mistake in caught.value.mistakes] == ["x.more", "x.count"]


def test_a_table_of_settings() -> None:
    table = {row.key: row for row in fields.rows(Outer, "x")}
    assert list(table)[-4:] == ["x.variables", "x.inner.size", "x.inner.share", "x.own"]
    assert table["x.count"] == SettingRow("x.count", 1, "whole number", "at least 0", "How many.")
    assert table["x.limit_s"] == SettingRow("x.limit_s", None, "number or null", "above 0", "")
    assert table["x.colour"] == SettingRow("x.colour", "red", "name", "`red`, `blue`", "")
    assert table["x.inner.share"] == SettingRow("x.inner.share", 0.5, "number", "from 0 to 1", "")
    assert table["x.own"] == SettingRow("x.own", None, "list or null", "", "")
