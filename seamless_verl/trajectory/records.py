"""The words of the record: segment and turn.

Invariant: a segment has as many logprobs as ids, all from one weight version and one replica; a
turn's generated tokens are its segments' in order, and nothing changes a turn once it has ended.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

TOKEN, LOGPROB = "i", "f"  # typecodes: 4 bytes each, so that a generated token costs 8 bytes held


class Finish(StrEnum):
    """How a turn ended."""

    STOP = "stop"
    """the model ended it, or a stop string did"""
    LENGTH = "length"
    """the token budget or the model's length did"""
    TOOL_CALLS = "tool_calls"
    """the model called tools"""
    CANCELLED = "cancelled"
    """the agent went away; what was produced stays on record"""
    FAILED = "failed"
    """no replica could go on; what was produced stays on record"""


def tokens(ids: Iterable[int]) -> array[int]:
    """Token ids, int32."""
    return array(TOKEN, ids)


def logprobs(values: Iterable[float]) -> array[float]:
    """Log-probabilities in nats, float32."""
    return array(LOGPROB, values)


def check_pairs(what: str, ids: Sequence[int], logprobs: Sequence[float]) -> None:
    """Raises ValueError unless there is exactly one logprob for each id."""
    if len(ids) != len(logprobs):
        raise ValueError(f"{what}: {len(logprobs)} logprobs for {len(ids)} ids; give one for each")


@dataclass(frozen=True)
class Segment:
    """A maximal run of generated tokens with one weight version from one replica.

    Raises:
        ValueError: it has not exactly one logprob for each id.
    """

    ids: array[int]
    logprobs: array[float]
    version: int
    replica: str

    def __post_init__(self) -> None:
        check_pairs("segment", self.ids, self.logprobs)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Turn:
    """One API call in a session that has ended: what the model read, and what it wrote.

    `request` and `reply` are the normalized request and the parsed reply as plain JSON values; they
    explain, they are never tokenized again.
    """

    turn_id: str
    prompt_ids: array[int]
    segments: Sequence[Segment]
    finish: Finish
    request: dict[str, Any] = field(default_factory=dict)
    reply: dict[str, Any] = field(default_factory=dict)

    @property
    def generated(self) -> int:
        """Tokens generated in this turn."""
        return sum(len(segment) for segment in self.segments)

    @property
    def generated_ids(self) -> array[int]:
        whole = array(TOKEN)
        for segment in self.segments:
            whole.extend(segment.ids)
        return whole
