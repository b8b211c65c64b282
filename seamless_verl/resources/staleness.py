"""The staleness bound: how many weight versions old a trained token may be.

A prompt submitted in step p starts on the weights of version p - 1, and step g trains the weights of
version g - 1, so that its oldest token is g - p versions old. With at most (S + 1) steps' worth of
prompts outstanding when the step begins, and the oldest taken first, none is trained more than S
versions late: the i-th oldest waits for i // batch updates. A prompt submitted later in the step has
missed its first updates, and as many fewer may be outstanding. Taking a younger group while an older
one still generates breaks that order. It is allowed only if every prompt left behind can still be
trained in time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class StalenessBound:
    """`max_staleness` in weight versions; `batch` prompts an update, `updates` of them a step."""

    max_staleness: int
    batch: int
    updates: int = 1

    def room(self, outstanding: int, ahead: int | None = None, update: int = 0) -> int:
        """How many more prompts may be submitted before update number `update` (from 0) of a step.

        With `ahead`, at most `ahead` + 1 steps' worth are outstanding at any time, and with 0 none is submitted
        for a later step. Without it as many as the bound allows.
        """
        step, trained = self.batch * self.updates, update * self.batch
        allowed = (self.max_staleness + 1) * step - trained
        wanted = allowed if ahead is None else (ahead + 1) * step if ahead else step - trained
        return max(0, min(allowed, wanted) - outstanding)

    def too_old(self, step: int, submitted: int) -> bool:
        """Whether training in `step` a prompt of step `submitted` would pass the bound."""
        return step - submitted > self.max_staleness

    def keeps(self, *, step: int, update: int, left_behind: Iterable[int]) -> bool:
        """Whether prompts left behind by update number `update` (from 0) of `step` stay within the bound.

        `left_behind` holds the steps in which they were submitted.
        """
        return not any(
            self.too_old(step + (update + 1 + i // self.batch) // self.updates, submitted)
            for i, submitted in enumerate(sorted(left_behind))
        )
