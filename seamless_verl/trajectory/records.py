"""Records of generated tokens: chunks as they arrive, segments of one weight version, and turns.

Invariants: chunks and segments have exactly one logprob per id, one weight version and one replica. A turn's
generated tokens are those of its segments in order. A turn does not change after it has ended.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any

from seamless_verl.trajectory.images import PromptImage, images_of
from seamless_verl.trajectory.routes import Routes

TOKEN, LOGPROB = "i", "f"  # typecodes: 4 bytes each: a generated token takes 8 bytes of memory


class Finish(StrEnum):
    """How a turn or a request to one replica ended."""

    STOP = "stop"  # by the model's end token or a stop string
    LENGTH = "length"  # by the token budget or the model's maximum length
    TOOL_CALLS = "tool_calls"  # the model called tools
    CANCELLED = "cancelled"  # the agent disconnected; the generated tokens stay on record
    FAILED = "failed"  # no replica could continue; the generated tokens stay on record
    CUT = "cut"
    """only of a request to one replica: a pause, a reclaim or a death aborted it, and its call continues elsewhere"""


class Grammar(IntEnum):
    """How far a grammar (JSON schema, required or strict tool) chose a token."""

    NONE = 0  # no grammar forbade anything there
    CHOSEN = 1  # the model chose among the tokens that the grammar allowed
    FORCED = 2  # the grammar allowed no other token


def tokens(ids: Iterable[int]) -> array[int]:
    """Token ids, int32."""
    return array(TOKEN, ids)


def logprobs(values: Iterable[float]) -> array[float]:
    """Log-probabilities in nats, float32."""
    return array(LOGPROB, values)


def check_lengths(
    what: str, ids: Sequence[int], logprobs: Sequence[float], grammar: bytes | bytearray, routes: Routes | None
) -> None:
    """Raises ValueError unless there is one logprob per id, and one grammar label and route each, or none at all."""
    if len(ids) != len(logprobs):
        raise ValueError(f"{what}: {len(logprobs)} logprobs for {len(ids)} ids; give one per id")
    if grammar and len(grammar) != len(ids):
        raise ValueError(f"{what}: {len(grammar)} grammar labels for {len(ids)} ids; give one per id, or none")
    if routes is not None and len(routes) != len(ids):
        raise ValueError(f"{what}: {len(routes)} routes for {len(ids)} ids; give one per id, or none")


@dataclass(frozen=True)
class Segment:
    """A maximal run of generated tokens with one weight version from one replica.

    `grammar` has a `Grammar` for each id, or nothing if all are NONE. `routes` has a row for each id, where its engine
    returns them.

    Raises:
        ValueError: it does not have exactly one logprob per id.
    """

    ids: array[int]
    logprobs: array[float]
    version: int
    replica: str
    grammar: bytearray = field(default_factory=bytearray)
    routes: Routes | None = None

    def __post_init__(self) -> None:
        check_lengths("segment", self.ids, self.logprobs, self.grammar, self.routes)

    def __len__(self) -> int:
        return len(self.ids)

    def part(self, start: int, stop: int) -> Segment:
        """Its tokens from `start` to before `stop`."""
        at = slice(start, stop)
        routes = None if self.routes is None else self.routes.part(start, stop)
        return replace(self, ids=self.ids[at], logprobs=self.logprobs[at], grammar=self.grammar[at], routes=routes)

    def chunk(self) -> TokenChunk:
        """Its tokens as one chunk, with the same arrays."""
        labels = bytes(self.grammar)
        return TokenChunk(self.ids, self.logprobs, self.version, self.replica, grammar=labels, routes=self.routes)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The likeliest tokens at one position, logprobs in nats, and the rank of the sampled token."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Generated tokens as they arrive: ids int32 [N], logprobs float32 [N] in nats, one weight version, one replica.

    The one shape of a generated token between an engine and the journal. The last chunk of a request, and only it,
    has a `finish_reason`; `error` is the cause if that is FAILED. `top` has one entry per id if the request asked for
    the likeliest tokens. `grammar` has a `Grammar` for each id, or nothing if all are NONE. `routes` has a row for each
    id if the request asked for them; the first chunk with ids then has the prompt's, too: `prompt_routes` are those of
    its last tokens. A chunk without ids has no meaningful version and replica.

    Raises:
        ValueError: it does not have exactly one logprob per id.
    """

    ids: array[int]
    logprobs: array[float]
    version: int
    replica: str = ""
    finish_reason: Finish | None = None
    stop_reason: int | str | None = None
    top: tuple[TopLogprobs, ...] | None = None
    error: Exception | None = None
    grammar: bytes = b""
    routes: Routes | None = None
    prompt_routes: Routes | None = None

    def __post_init__(self) -> None:
        check_lengths("chunk", self.ids, self.logprobs, self.grammar, self.routes)

    def without_tokens(self) -> TokenChunk:
        """Its end, if it is one, alone."""
        return empty_chunk(
            self.finish_reason,
            version=self.version,
            replica=self.replica,
            stop_reason=self.stop_reason,
            error=self.error,
        )

    def without_routes(self) -> TokenChunk:
        return self if self.routes is None else replace(self, routes=None, prompt_routes=None)


def empty_chunk(finish_reason: Finish | None = None, *, version: int = 0, replica: str = "", **why: Any) -> TokenChunk:
    """A chunk without tokens: the end of a request; `why` is its `stop_reason` or its `error`."""
    return TokenChunk(tokens(()), logprobs(()), version, replica, finish_reason, **why)


def append_chunk(segments: list[Segment], chunk: TokenChunk | Segment) -> None:
    """Appends a chunk's tokens to the segments.

    Segments are maximal: the last segment is extended if it has the chunk's version and replica. The arrays in
    `segments` are copies, so the chunk does not change.
    """
    if not len(chunk.ids):
        return
    if segments and (segments[-1].version, segments[-1].replica) == (chunk.version, chunk.replica):
        last = segments[-1]
        if last.grammar or chunk.grammar:
            last.grammar.extend(bytes(len(last) - len(last.grammar)))
            last.grammar.extend(chunk.grammar or bytes(len(chunk.ids)))
        last.ids.extend(chunk.ids)
        last.logprobs.extend(chunk.logprobs)
        if last.routes is not None and chunk.routes is not None and last.routes.form == chunk.routes.form:
            last.routes.extend(chunk.routes)
        elif last.routes is not None:  # rows that are not all there are none
            segments[-1] = replace(last, routes=None)
    else:
        routes = None if chunk.routes is None else chunk.routes.part(0)
        beside = (chunk.version, chunk.replica, bytearray(chunk.grammar), routes)
        segments.append(Segment(chunk.ids[:], chunk.logprobs[:], *beside))


def merge_chunks(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """One chunk of all tokens of these chunks, which have one request, weight version and replica; ends as the last."""
    last, segments = chunks[-1], list[Segment]()
    for chunk in chunks:
        append_chunk(segments, chunk)
    top = tuple(entry for chunk in chunks for entry in chunk.top or ())
    of_prompt = next((chunk.prompt_routes for chunk in chunks if chunk.prompt_routes is not None), None)
    if not segments:
        return replace(last, top=top or None)
    (merged,) = segments
    return replace(
        last,
        ids=merged.ids,
        logprobs=merged.logprobs,
        version=merged.version,
        replica=merged.replica,
        top=top or None,
        grammar=bytes(merged.grammar),
        routes=merged.routes,
        prompt_routes=of_prompt,
    )


@dataclass(frozen=True)
class Turn:
    """One API call of a session, ended: what the model read, and what it generated.

    `request` and `reply` are the normalized request and the parsed reply as plain JSON values. They are for readers
    and are never tokenized again. `prompt_routes` are the rows of the prompt's last tokens, as far as the engine was
    asked for them.
    """

    turn_id: str
    prompt_ids: array[int]
    segments: Sequence[Segment]
    finish: Finish
    request: dict[str, Any] = field(default_factory=dict)
    reply: dict[str, Any] = field(default_factory=dict)
    prompt_routes: Routes | None = None

    @property
    def images(self) -> tuple[PromptImage, ...]:
        """Those of its prompt, in their order."""
        return images_of(self.request)

    @property
    def generated(self) -> int:
        """The number of tokens generated in this turn."""
        return sum(len(segment) for segment in self.segments)

    @property
    def generated_ids(self) -> array[int]:
        ids = array(TOKEN)
        for segment in self.segments:
            ids.extend(segment.ids)
        return ids
