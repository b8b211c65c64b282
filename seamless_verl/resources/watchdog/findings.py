"""What the watchdog found, and how it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seamless_verl.resources.watchdog.marks import Key

NAMED = 3  # of the items a culprit holds up, how many the report names


class Verdict(StrEnum):
    """Why an item does not go on."""

    STUCK = "stuck"
    """it waits for nothing that is known, and does not move: look here first"""
    DEADLOCK = "deadlock"
    """it waits for something that waits, in turn, for it"""
    NOT_WOKEN = "not woken"
    """nothing it waits for is there any more, and it does not move"""
    SLOW = "slow"
    """it is overdue, but what it waits for still moves"""
    HELD_UP = "held up"
    """it waits for one that stands still: the culprit"""


@dataclass(frozen=True)
class Finding:
    """An item that stands still; times are monotonic seconds, `since` that of its last progress.

    `waits_on` is what it said it waits for; `culprit` the item that explains it, maybe itself; `cycle` the ring of a
    deadlock, each waiting for the next and the last for the first; `overdue` how long its limit or deadline is
    over, below 0 when it is not.
    """

    kind: str
    id: str
    verdict: Verdict
    began: float
    since: float
    now: float
    overdue: float
    waits_on: tuple[Key, ...]
    culprit: Key
    cycle: tuple[Key, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind} '{self.id}'"

    @property
    def is_culprit(self) -> bool:
        """Whether it explains others, and is explained by none; one of each deadlock is."""
        return (self.kind, self.id) == self.culprit

    def __str__(self) -> str:
        late = f", overdue by {self.overdue:.1f} s" if self.overdue >= 0 else ""
        return f"{self.name}: {self.verdict} for {self.now - self.since:.1f} s{late}{self._on()}"

    def _on(self) -> str:
        if self.cycle:
            ring = [*self.cycle, self.cycle[0]]
            return "; " + " waits for ".join(map(str, ring))
        if self.verdict is Verdict.NOT_WOKEN:
            return f"; waits for {listed(self.waits_on)}, ended or never begun"
        return f"; waits for {listed(self.waits_on)}" if self.waits_on else "; waits for nothing that is known"


def report(findings: Sequence[Finding]) -> str:
    """The culprits, each with what it holds up, for a person to read; empty when there is nothing."""
    lines = []
    for culprit in (finding for finding in findings if finding.is_culprit):
        lines.append(str(culprit))
        held = [f for f in findings if f.verdict is Verdict.HELD_UP and f.culprit == culprit.culprit]
        for kind in dict.fromkeys(f.kind for f in held):
            of_kind = [f for f in held if f.kind == kind]
            longest = max(f.now - f.since for f in of_kind)
            names = listed([f.name for f in of_kind])
            lines.append(f"  holds up {len(of_kind)} of kind {kind}, one for {longest:.1f} s: {names}")
    return "\n".join(lines)


def listed(names: Sequence[object]) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(str, names[:NAMED])) + more
