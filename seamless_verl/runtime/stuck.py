"""What becomes of the nodes that are over their limits: each is named, gets one recovery at most, and is then left.

Owned state: the stage of each node that is over its limit, by its name, and counts of the run.

Invariants:
- A node that is over its limit is named once, and again only after it was within its limit meanwhile.
- A node gets at most one recovery until it is within its limit again. If it is over the limit for as long again after
  that, it is left.
- Named = ended + those that are over their limits now.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from seamless_verl.errors import IntegrityError
from seamless_verl.runtime.waits import Blocked, WaitKind


class StuckStage(StrEnum):
    """How far it is with a node that is over its limit."""

    NAMED = "named"
    """it was named; its recovery, if there is one, was not possible yet"""
    TRIED = "tried"
    """its recovery was tried, and may take as long as its limit"""
    LEFT = "left"
    """its recovery did not help"""
    ENDED = "ended"
    """it is within its limit again, or gone"""


NAMED, TRIED, LEFT, ENDED = StuckStage

LEGAL: dict[tuple[StuckStage, StuckStage], str] = {
    (NAMED, TRIED): "a recovery was tried",
    (TRIED, LEFT): "it is over its limit for as long again after its recovery",
    **{(stage, ENDED): "it is within its limit again" for stage in (NAMED, TRIED, LEFT)},
}
"""(from, to): why."""


@dataclass
class _Case:
    kind: WaitKind
    stage: StuckStage = NAMED
    since: float = 0.0  # when its recovery was tried


class StuckNodes:
    """Follows the nodes over their limits; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._cases: dict[str, _Case] = {}
        self._named: Counter[WaitKind] = Counter()
        self._tried: Counter[WaitKind] = Counter()
        self._ended = 0

    def stage(self, name: str) -> StuckStage:
        """The stage of this node; ENDED for one that is within its limit."""
        case = self._cases.get(name)
        return ENDED if case is None else case.stage

    def look(self, blocked: Sequence[Blocked]) -> list[Blocked]:
        """Takes what is found at one moment; returns those that are over their limits since the last call."""
        over = {one.over.name: one for one in blocked}
        for name in self._cases.keys() - over.keys():
            self._move(name, ENDED)
        for name, one in over.items():
            case, limit = self._cases.get(name), one.limits.get(one.over.kind) or 0.0
            if case is not None and case.stage is TRIED and self._clock() - case.since > limit:
                self._move(name, LEFT)
        new = [one for name, one in over.items() if name not in self._cases]
        for one in new:
            self._cases[one.over.name] = _Case(one.over.kind)
            self._named[one.over.kind] += 1
        return new

    def tried(self, name: str) -> None:
        """The node's recovery was tried."""
        self._tried[self._cases[name].kind] += 1
        self._cases[name].since = self._clock()
        self._move(name, TRIED)

    def metrics(self) -> dict[str, float]:
        """Counts of the run by kind, and how many nodes were over their limits at the last look."""
        self.check_integrity()
        counts = {f"watchdog/named/{kind}": float(count) for kind, count in self._named.items()}
        tried = {f"watchdog/recovery/{kind}": float(count) for kind, count in self._tried.items()}
        return {"watchdog/over_limit": float(len(self._cases)), **counts, **tried}

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each node that was named has ended, or is over its limit."""
        if self._named.total() != self._ended + len(self._cases):
            raise IntegrityError("nodes named = ended + over", self._named.total(), self._ended + len(self._cases))

    def _move(self, name: str, stage: StuckStage) -> None:
        case = self._cases[name]
        assert (case.stage, stage) in LEGAL, f"{name} is {case.stage}, and cannot be {stage}"
        case.stage = stage
        if stage is ENDED:
            del self._cases[name]
            self._ended += 1
