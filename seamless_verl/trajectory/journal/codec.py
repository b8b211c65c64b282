"""Bytes on disk: arrays are little endian, dicts are UTF-8 JSON."""

from __future__ import annotations

import json
import sys
from array import array
from typing import Any

from seamless_verl.trajectory.records import LOGPROB, TOKEN

GROWING = ("messages", "input")  # a conversation grows at its end, so it is written last: calls then share a prefix
OWN = ("gateway",)  # differs in every call, so it comes after even that


def pack(values: array[Any]) -> bytes:
    """The array's elements, 4 bytes each.

    Raises:
        TypeError: they are neither int32 nor float32.
    """
    if values.typecode not in (TOKEN, LOGPROB):
        raise TypeError(f"an array of '{values.typecode}' is neither token ids nor logprobs; make it with records")
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _unpack(typecode: str, data: bytes) -> array[Any]:
    values: array[Any] = array(typecode, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def unpack_ids(data: bytes) -> array[int]:
    """Token ids, int32."""
    return _unpack(TOKEN, data)


def unpack_logprobs(data: bytes) -> array[float]:
    """Log-probabilities, float32."""
    return _unpack(LOGPROB, data)


def to_json(value: dict[str, Any]) -> bytes:
    """Compact JSON, the growing keys last, and then the call's own."""
    if any(key in value for key in GROWING):
        value = dict(sorted(value.items(), key=lambda item: (item[0] in OWN, item[0] in GROWING)))
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def from_json(data: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(data.decode("utf-8", "surrogatepass"))
    return value
