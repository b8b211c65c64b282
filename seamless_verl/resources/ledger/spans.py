"""What a device can be doing, and how a source says that it did. Times are monotonic seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from seamless_verl.resources.ledger.clock import SAME_CLOCK, ClockOffset


class Kind(StrEnum):
    """What a device-second was spent on. Where several are reported at once, the first of these counts.

    The order is from the most direct measurement to the least: a computation that ran on the device; its
    weights being written; a hand-over somebody waits for, of which a sync may be a part; requests that were
    in the engine, which says that there was work but not that any was done.
    """

    TRAIN = "train"
    """a computation of the trainer's worker ran on it"""
    SYNC = "sync"
    """its replica's weights were being replaced"""
    SWITCH = "switch"
    """it was being paused, handed over or brought back: from the order until it was done"""
    ROLLOUT = "rollout"
    """its engine had at least one running request and was not paused"""
    IDLE = "idle"
    """none of these"""


BUSY: tuple[Kind, ...] = tuple(
    kind for kind in Kind if kind is not Kind.IDLE
)  # what sources report; idle is what remains
RANK = {kind: rank for rank, kind in enumerate(Kind)}


class Span(NamedTuple):
    """A device did something in [start, end); an open one still does at `end`, the moment it was reported."""

    device: str
    kind: Kind
    start: float
    end: float
    open: bool = False


@dataclass(frozen=True)
class Taken:
    """What a source did up to `until` since it was last asked; spans that were open then begin anew here.

    `dropped` are the seconds by kind that it could not keep until it was asked.
    """

    source: str
    until: float
    spans: tuple[Span, ...] = ()
    dropped: Mapping[Kind, float] = field(default_factory=dict)

    def on(self, clock: ClockOffset = SAME_CLOCK) -> Taken:
        """The same by the clock of the ledger; `clock` is that of the source."""
        here = clock.here
        spans = tuple(span._replace(start=here(span.start), end=here(span.end)) for span in self.spans)
        return Taken(self.source, here(self.until), spans, self.dropped)
