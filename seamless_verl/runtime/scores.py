"""The one gate of scores: what a reward function, a reward model, an agent or a program outside gives, as a number.

A score that is no finite number would make every weight NaN, and a zero in its place would be a wrong answer. So who
asks for a score gets a float, or a ValueError that says what was given. Pure: arrays and tensors are known by their
methods.

What an agent returns besides its reward is sent to the run, whatever it is: `to_json_value` makes numbers and lists of
NumPy's scalars and arrays, and a repr of what has no JSON form. Nothing is raised: a task must not end its runner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal
from numbers import Real
from typing import Any

from seamless_verl.errors import shorten

LARGEST = 3.4028234663852886e38  # of float32, in which a row has its score
SHOWN_CHARS = 80  # of a value in a message
MAX_DEPTH = 32  # of nesting; a list may also contain itself
MAX_REPR = 1000  # characters of a value that has no JSON form
SMALLEST_INT, LARGEST_INT = -(1 << 63), (1 << 64) - 1  # of the integers that the encoder writes


def score_of(value: object) -> float:
    """The value as a float: of a bool, any real number, or an array or tensor of one element.

    Raises ValueError, with the value and its type, for anything else and for a number that float32 does not hold.
    """
    try:
        number = _element(value)
        score = float(number) if isinstance(number, Real | Decimal) else math.nan
    except Exception:  # a value of the user's own may raise anything, and a whole number may be too large
        score = math.nan
    if not abs(score) <= LARGEST:
        raise ValueError(f"{shown(value)} of type {type(value).__name__} is no finite number")
    return score


def _element(value: Any) -> object:
    """The one element of numpy's scalars and of arrays and tensors with one; any other value as it is."""
    count = value.numel() if callable(getattr(value, "numel", None)) else getattr(value, "size", None)
    return value.item() if isinstance(count, int) and count == 1 else value


def shown(value: object) -> str:
    """The value for a message, whatever it is."""
    try:
        return shorten(repr(value), SHOWN_CHARS)
    except Exception:  # a repr of the user's own, or a whole number of more digits than Python writes
        return "a value that cannot be shown"


def beside_score(info: object) -> dict[str, Any]:
    """What a reward function gave beside its score, with plain numbers and values that JSON has; {} for no mapping.

    A number that is not finite is None.
    """
    return {str(name): _plain(value) for name, value in info.items()} if isinstance(info, Mapping) else {}


def _plain(value: object) -> Any:
    try:
        score = score_of(value)
    except ValueError:
        return to_json_value(value)
    return value if isinstance(value, int) else score


def without_unscored(
    sources: Sequence[str],
    uids: Sequence[str],
    infos: Mapping[str, Sequence[Any]],
    turns: Sequence[Any],
    expected: Mapping[tuple[str, str], int],
) -> tuple[tuple[list[str], list[str], dict[str, list[Any]], list[Any], dict[tuple[str, str], int]], int]:
    """A validation's columns without the samples that have no score (NaN), and how many those are.

    `infos` are columns beside the scores: of them numbers stay, which can be averaged, and of `pred`, answers that are
    counted, all as texts unless all are numbers. `expected` samples of a source and a prompt are fewer by these.
    """
    scores = infos.get("reward", [])
    scored = [i for i, score in enumerate(scores) if math.isfinite(score)]
    missing = Counter((str(sources[i]), str(uids[i])) for i, score in enumerate(scores) if not math.isfinite(score))
    kept_sources, kept_uids, kept_turns = ([column[i] for i in scored] for column in (sources, uids, turns))
    columns = {
        name: _metric_values([values[i] for i in scored], texts=name == "pred") for name, values in infos.items()
    }
    counts = {key: count - missing[key] for key, count in expected.items()}
    return (kept_sources, kept_uids, columns, kept_turns, counts), missing.total()


def _metric_values(values: Sequence[object], *, texts: bool) -> list[Any]:
    numbers = [value if isinstance(value, int | float) else None for value in values]
    if not texts or None not in numbers:
        return numbers
    return [None if value is None else str(value) for value in values]


def to_json_value(value: object, depth: int = MAX_DEPTH) -> Any:
    """The value with None, bool, int, float, str, list and dict only; a float that is not finite is None."""
    try:
        return _converted(value, depth)
    except Exception:  # an object of the agent's own may raise anything, also in its repr
        return f"<{type(value).__name__} that cannot be read>"


def to_text(value: str) -> str:
    """The text without halves of surrogate pairs, which are no characters."""
    return value.encode("utf-8", "replace").decode()


def _converted(value: object, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return to_text(value)
    if isinstance(value, int) and SMALLEST_INT <= value <= LARGEST_INT:
        return int(value)
    if isinstance(value, float):  # also numpy's float64
        return float(value) if math.isfinite(value) else None
    if depth > 0 and isinstance(value, Mapping):
        return {to_text(str(key)): to_json_value(item, depth - 1) for key, item in value.items()}
    if depth > 0 and isinstance(value, list | tuple | Set):
        return [to_json_value(item, depth - 1) for item in value]
    if depth > 0 and callable(tolist := getattr(value, "tolist", None)):  # numpy's other scalars, and arrays
        return to_json_value(tolist(), depth - 1)
    return to_text(repr(value)[:MAX_REPR])
