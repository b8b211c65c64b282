"""Whatever an agent returns besides its reward can be sent to the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.runtime.scores import to_json_value


class Unreadable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Broken(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        raise RuntimeError("no")

    def __iter__(self) -> Iterator[str]:
        return iter(("a",))

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": [1, 2.5, None, True, "x"]}, {"a": [1, 2.5, None, True, "x"]}),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ((1, {2}), [1, [2]]),
        ({("a", 1): 2, 3: 4}, {"('a', 1)": 2, "3": 4}),
        (float("nan"), None),
        (1 << 64, str(1 << 64)),
        (b"x", "b'x'"),
        ("half \ud800", "half ?"),
        ({"\ud800": object}, {"?": "<class 'object'>"}),
        (Unreadable(), "<Unreadable that cannot be read>"),
        ({"b": Broken()}, {"b": "<Broken that cannot be read>"}),
    ],
)
def test_each_value_has_a_json_form(value: Any, expected: Any) -> None:
    found = to_json_value(value)
    assert found == expected and type(found) is type(expected)
    assert json.loads(msgspec.json.encode(found)) == expected


def test_a_list_that_contains_itself_ends() -> None:
    endless: list[Any] = [1]
    endless.append(endless)
    msgspec.json.encode(to_json_value(endless))


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters())
    | st.binary()
    | st.floats(width=32).map(np.float32)
    | st.integers(-(1 << 63), (1 << 63) - 1).map(np.int64)
    | st.builds(object)
    | st.complex_numbers()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters()) | st.integers(), inner)
)


@given(VALUES)
def test_nothing_is_refused_by_the_encoder(value: Any) -> None:
    msgspec.json.encode(to_json_value(value))
