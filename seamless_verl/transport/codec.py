"""What the two ends say to each other: a message is a msgpack list that begins with its kind.

    HELLO   protocol, token            client, once, first
    WELCOME replica                    server, once, first
    GENERATE call, request, prompt, sampling, carried, kin
    DROP    call                       the client left the call; nothing more is sent for it
    ABORT   request                    the request is to end with CUT
    DELTA   call, ids, logprobs, version, finish, stop_reason, top
    LOST    call, reason               the engine behind the server is gone
    REFUSED reason                     the connection is closed after this

`call` is a number the client gives; arrays are raw little-endian bytes, 4 a token.
"""

from __future__ import annotations

import sys
from array import array
from enum import IntEnum
from typing import Any

from seamless_verl.rollout.engine import Delta, EngineFinish, EngineRequest, TopLogprobs

PROTOCOL = 2
SWAP = sys.byteorder == "big"


class MessageKind(IntEnum):
    """The first item of a message."""

    HELLO = 0
    WELCOME = 1
    GENERATE = 2
    DROP = 3
    ABORT = 4
    DELTA = 5
    LOST = 6
    REFUSED = 7


def packed(values: array[Any]) -> bytes:
    if SWAP:
        values = values[:]
        values.byteswap()
    return values.tobytes()


def unpacked(typecode: str, raw: Any) -> array[Any]:
    """Raises ValueError unless these are bytes of whole items, TypeError unless they are bytes."""
    if not isinstance(raw, bytes):
        raise TypeError(f"an array came as {type(raw).__name__}")
    values: array[Any] = array(typecode, raw)
    if SWAP:
        values.byteswap()
    return values


def request_message(call: int, request: EngineRequest) -> list[Any]:
    prompt = packed(request.prompt_ids)
    return [
        MessageKind.GENERATE,
        call,
        request.request_id,
        prompt,
        dict(request.sampling),
        request.carried,
        request.kin,
    ]


def read_request(items: list[Any]) -> EngineRequest:
    """From a GENERATE message without kind and call; raises ValueError or TypeError on anything else."""
    request_id, prompt, sampling, carried, kin = items
    named = isinstance(request_id, str) and isinstance(kin, str)
    if not (named and isinstance(sampling, dict) and isinstance(carried, int)):
        raise TypeError("a request needs a name, its kin's, its sampling, and how much of it is carried")
    return EngineRequest(request_id, unpacked("i", prompt), sampling, carried, kin)


def delta_message(call: int, delta: Delta) -> list[Any]:
    top = delta.top and [(entry.ids, entry.logprobs, entry.rank) for entry in delta.top]
    ids, logprobs = packed(delta.ids), packed(delta.logprobs)
    return [MessageKind.DELTA, call, ids, logprobs, delta.version, delta.finish, delta.stop_reason, top]


def read_delta(items: list[Any]) -> Delta:
    """From a DELTA message without kind and call; raises ValueError or TypeError on anything else."""
    ids, logprobs, version, finish, stop_reason, top = items
    if not isinstance(version, int) or not isinstance(stop_reason, int | str | None):
        raise TypeError("a delta needs its version, and a number or text if it says why it stopped")
    taken, values = unpacked("i", ids), unpacked("f", logprobs)
    if len(taken) != len(values):
        raise ValueError(f"{len(values)} logprobs for {len(taken)} ids")
    tops = None if top is None else tuple(TopLogprobs(tuple(names), tuple(probs), rank) for names, probs, rank in top)
    return Delta(taken, values, version, None if finish is None else EngineFinish(finish), stop_reason, tops)
