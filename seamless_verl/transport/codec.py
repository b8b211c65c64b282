"""Messages between a data plane and a replica's server, as msgpack.

A message is a list that begins with its tag; a frame is a list of messages. Arrays are raw bytes, 4 for each token,
little-endian as all hosts of accelerators are. `call` is a number that the client chooses.
"""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

import msgspec

from seamless_verl.rollout.engine import EngineRequest
from seamless_verl.trajectory.records import LOGPROB, TOKEN, Finish, TokenChunk, TopLogprobs
from seamless_verl.trajectory.routes import packed, unpacked

PROTOCOL = 8


class Hello(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """From the client, once, first."""

    protocol: int
    token: str


class Welcome(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """From the server, once, first."""

    replica_id: str


class Generate(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """A request to run; see EngineRequest."""

    call: int
    request_id: str
    prompt: bytes
    sampling: dict[str, Any]
    resumed_tokens: int
    conversation: str
    priority: int
    media: bytes = b""
    routes_from: int | None = None
    first_prompt: str = ""


class Drop(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """The client reads the call no more; nothing more is sent for it."""

    call: int


class Chunk(msgspec.Struct, array_like=True, tag=5, frozen=True):
    """Tokens of a call; see TokenChunk. The client adds the replica."""

    call: int
    ids: bytes
    logprobs: bytes
    version: int
    finish_reason: Finish | None
    stop_reason: int | str | None
    top: list[tuple[tuple[int, ...], tuple[float, ...], int]] | None
    grammar: bytes = b""
    routes: bytes = b""
    prompt_routes: bytes = b""


class Lost(msgspec.Struct, array_like=True, tag=6, frozen=True):
    """The engine behind the server is gone."""

    call: int
    reason: str


class Refused(msgspec.Struct, array_like=True, tag=7, frozen=True):
    """The connection is closed after this."""

    reason: str


Message: TypeAlias = Hello | Welcome | Generate | Drop | Chunk | Lost | Refused
encode_message = msgspec.msgpack.Encoder().encode
decode_frame = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
"""The messages of a frame, each still encoded. Raises ValueError (msgspec.DecodeError) for anything but a list."""
decode_message = msgspec.msgpack.Decoder(Message).decode
"""Raises ValueError (msgspec.DecodeError) for anything but a message."""


def generate_message(call: int, request: EngineRequest) -> Generate:
    prompt, sampling = request.prompt_ids.tobytes(), dict(request.sampling)
    beside = (request.resumed_tokens, request.conversation, request.priority, request.media, request.routes_from)
    return Generate(call, request.request_id, prompt, sampling, *beside, request.first_prompt)


def engine_request(message: Generate) -> EngineRequest:
    """Raises ValueError unless the prompt is whole tokens."""
    prompt = unpack_array(TOKEN, message.prompt)
    beside = (message.resumed_tokens, message.conversation, message.priority, message.media, message.routes_from)
    return EngineRequest(message.request_id, prompt, message.sampling, *beside, message.first_prompt)


def chunk_message(call: int, chunk: TokenChunk) -> Chunk:
    top = chunk.top and [(entry.ids, entry.logprobs, entry.rank) for entry in chunk.top]
    ids, logprobs, end = chunk.ids.tobytes(), chunk.logprobs.tobytes(), (chunk.finish_reason, chunk.stop_reason)
    routes = packed(chunk.routes), packed(chunk.prompt_routes)
    return Chunk(call, ids, logprobs, chunk.version, *end, top or None, chunk.grammar, *routes)


def token_chunk(message: Chunk, replica_id: str) -> TokenChunk:
    """Raises ValueError unless there is one logprob for each id, and one grammar label and route, or none at all."""
    return TokenChunk(
        unpack_array(TOKEN, message.ids),
        unpack_array(LOGPROB, message.logprobs),
        message.version,
        replica_id,
        message.finish_reason,
        message.stop_reason,
        None if message.top is None else tuple(TopLogprobs(*entry) for entry in message.top),
        grammar=message.grammar,
        routes=unpacked(message.routes),
        prompt_routes=unpacked(message.prompt_routes),
    )


def unpack_array(typecode: str, raw: bytes) -> array[Any]:
    """Raises ValueError unless these are the bytes of whole items."""
    return array(typecode, raw)
