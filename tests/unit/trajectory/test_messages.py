"""Messages are compared by what they say: tool arguments as the JSON values that any client writes again."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seamless_verl.trajectory.messages import Message, parse_message

NUMBERS = st.one_of(st.integers(), st.integers(-(2**80), 2**80), st.floats(allow_nan=False, allow_infinity=False))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=5))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def calling(arguments: str) -> Message:
    function = {"name": "f", "arguments": arguments}
    return parse_message({"role": "assistant", "tool_calls": [{"type": "function", "function": function}]})


def javascript(value: Any) -> str:
    """What JSON.stringify(JSON.parse(text)) makes of a value's text: keys may be in another order."""
    if isinstance(value, bool) or not isinstance(value, int | float | list | dict):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ",".join(map(javascript, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{javascript(value[key])}" for key in sorted(value)) + "}"
    number = float(value)
    if number.is_integer() and abs(number) < 1e21:
        return str(int(Decimal(repr(number))))  # the shortest digits that give the float, then zeros
    return repr(number)


@pytest.mark.parametrize(
    ("value", "text"),
    [(5000.0, "5000"), (-0.0, "0"), (12345678901234567890, "12345678901234567000"), (2**53 + 1, "9007199254740992")],
)
def test_what_javascript_makes_of_a_number(value: Any, text: str) -> None:
    assert javascript(value) == text
    assert calling(json.dumps({"n": value})).same(calling(f'{{"n":{text}}}'))


@given(VALUES)
@example(1e21)
@example(10**22)
@example(-(2**53))
@example(1e300)
@example(5e-324)
def test_a_value_that_javascript_wrote_again_is_the_same(value: Any) -> None:
    assert calling(json.dumps(value)).same(calling(javascript(value)))
    assert calling(json.dumps(value)).same(calling(json.dumps(value, indent=1)))


@given(VALUES, VALUES)
def test_others_stay_different(first: Any, second: Any) -> None:
    assert calling(json.dumps(first)).same(calling(json.dumps(second))) == (javascript(first) == javascript(second))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *[("1", "2"), ('"a"', '"b"'), ("true", "1"), ("false", "0"), ("null", "0"), ("true", '"true"')],
        *[
            ('"5000"', "5000"),
            ('"false"', "false"),
            ("1.5", "1"),
            ("[]", "{}"),
            ("9007199254740992", "9007199254740994"),
        ],
        *[("NaN", "Infinity"), ("1e999", "NaN"), ("1" + "0" * 400, "1" + "0" * 401), ("{", "{{")],
    ],
)
def test_different_arguments_are_different(first: str, second: str) -> None:
    assert calling(first).same(calling(first))
    assert not calling(first).same(calling(second))


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "1e999", "1" + "0" * 400, "9" * 5000, "{a: 1}", ""])
def test_what_no_number_of_javascript_is_has_the_notation_of_json(text: str) -> None:
    (call,) = calling(text).calls
    try:
        expected = json.dumps(json.loads(text))
    except ValueError:
        expected = text
    assert call.canonical == expected
