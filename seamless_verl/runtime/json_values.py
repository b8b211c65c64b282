"""Any value as one that JSON has: what an agent returns besides its reward is sent to the run, whatever it is.

Numpy's scalars and arrays become numbers and lists. What has no JSON form becomes its repr, and nothing is raised: a
task must not end its runner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

MAX_DEPTH = 32  # of nesting; a list may also contain itself
MAX_REPR = 1000  # characters of a value that has no JSON form
SMALLEST, LARGEST = -(1 << 63), (1 << 64) - 1  # of the integers that the encoder writes


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
    if isinstance(value, int) and SMALLEST <= value <= LARGEST:
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
