"""Prompts between submission and training, under the staleness bound.

Invariant: submitted = trained + dropped + outstanding. A prompt is outstanding while its samples generate,
while it waits as ready, and while the trainer has it in hand.
"""

from __future__ import annotations

from seamless_verl.errors import IntegrityError
from seamless_verl.resources.staleness import StalenessBound
from seamless_verl.simulator.samples import Group


class Groups:
    """`heed` is whether the bound holds training back, or only limits how many prompts are outstanding."""

    def __init__(self, bound: StalenessBound, *, heed: bool = True) -> None:
        self.bound, self.heed = bound, heed
        self.generating: list[Group] = []
        self.ready: list[Group] = []
        self.in_hand: list[Group] = []
        self.finished = self.submitted = self.trained = self.dropped = 0

    @property
    def outstanding(self) -> int:
        return len(self.generating) + len(self.ready) + len(self.in_hand)

    def submit(self, group: Group) -> None:
        self.generating.append(group)
        self.submitted += 1

    def finish(self, group: Group) -> None:
        """All its samples are done and rewarded; one that was dropped meanwhile stays dropped."""
        if group in self.generating:
            self.generating.remove(group)
            self.ready.append(group)
            self.finished += 1

    def enough(self) -> bool:
        return len(self.ready) >= self.bound.batch

    def held(self, step: int, update: int) -> bool:
        """Enough are ready, but taking them would leave one behind that could not be trained in time."""
        return self.enough() and bool(self.late(step, update))

    def late(self, step: int, update: int) -> list[Group]:
        """The oldest generating groups, if one would be trained too late once the oldest ready ones were taken."""
        if not self.heed or not self.generating:
            return []
        rest = self._oldest()[self.bound.batch :]
        left = [group.submitted for group in (*rest, *self.generating)]
        if self.bound.keeps(step=step, update=update, left=left):
            return []
        oldest = min(group.submitted for group in self.generating)
        return sorted((group for group in self.generating if group.submitted == oldest), key=_age)

    def take(self) -> list[Group]:
        """The oldest ready groups of one mini-batch."""
        self.in_hand = self._oldest()[: self.bound.batch]
        self.ready = [group for group in self.ready if group not in self.in_hand]
        return self.in_hand

    def hand_back(self) -> list[Group]:
        """The mini-batch in hand has been trained."""
        done, self.in_hand = self.in_hand, []
        self.trained += len(done)
        return done

    def drop(self, group: Group) -> None:
        self.generating.remove(group)
        self.dropped += 1

    def check_integrity(self) -> None:
        """Raises IntegrityError when a group was lost or counted twice."""
        found = self.trained + self.dropped + self.outstanding
        if found != self.submitted:
            raise IntegrityError("groups submitted = trained + dropped + outstanding", self.submitted, found)

    def _oldest(self) -> list[Group]:
        return sorted(self.ready, key=_age)


def _age(group: Group) -> tuple[int, int]:
    return group.submitted, group.number
