"""Which sequences of a batch go into one micro-batch, where what they share is computed once.

Sequences in sorted order share their longest prefixes with their neighbours, so that a family, such as the samples of a
prompt, is a run of them. Families are kept whole. One that does not fit is cut where the least is shared, and what
stands at the cut is computed on both sides. A micro-batch's cost is the number of tokens that are computed for it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from seamless_verl.shared_prefixes.layout import Ints, sort_by_prefix

WHOLE = 8
"""Times the limit that a micro-batch's sequences may have in all: attention keeps the keys that each of them sees."""


@dataclass(frozen=True)
class SortedSequences:
    """The sequences of a batch in the order of their ids, [sequences].

    `lengths` are their tokens, and `shared` how many the one before begins with too.
    """

    lengths: Ints
    shared: Ints

    @cached_property
    def own(self) -> Ints:
        """Tokens that each sequence adds to those before it, as a running sum that begins with 0, [sequences + 1]."""
        return np.concatenate([[0], np.cumsum(self.lengths - self.shared)])

    def cost(self, start: int, end: int) -> int:
        """Tokens that are computed for a run of sequences, by themselves."""
        return int(self.own[end] - self.own[start] + self.shared[start])

    def whole(self, start: int, end: int) -> int:
        """Tokens of a run of sequences, each counted by itself."""
        return int(self.lengths[start:end].sum())

    def between(self, one: int, later: int) -> int:
        """The common prefix of two sequences."""
        return int(self.shared[one + 1 : later + 1].min())

    def pieces(self, start: int, end: int, limit: int) -> list[tuple[int, int]]:
        """The run as families that fit, the costliest first, each cut of which is where the least is shared."""
        found, left = list[tuple[int, int]](), [(start, end)]
        while left:
            start, end = left.pop()
            fits = self.cost(start, end) <= limit and self.whole(start, end) <= WHOLE * limit
            if fits or end - start == 1:
                found.append((start, end))
                continue
            inner = self.shared[start + 1 : end]
            cuts = [start, *(np.flatnonzero(inner == inner.min()) + start + 1).tolist(), end]
            left += sorted(pairwise(cuts), key=lambda run: self.cost(*run))
        return found


@dataclass
class MicroBatch:
    """Runs of sorted sequences, in order, and the tokens that are computed for them together."""

    runs: list[tuple[int, int]] = field(default_factory=list)
    cost: int = 0
    whole: int = 0

    def added_cost(self, run: tuple[int, int], among: SortedSequences) -> int:
        """Tokens that are computed in addition if `run` were here too."""
        start, end = run
        place = bisect(self.runs, run)
        before = self.runs[place - 1][1] - 1 if place else None
        behind = self.runs[place][0] if place < len(self.runs) else None
        saved = among.between(before, start) if before is not None else 0
        saved += among.between(end - 1, behind) if behind is not None else 0
        counted = among.between(before, behind) if before is not None and behind is not None else 0
        return among.cost(start, end) - saved + counted

    def add(self, run: tuple[int, int], cost: int, among: SortedSequences) -> None:
        self.runs.insert(bisect(self.runs, run), run)
        self.cost += cost
        self.whole += among.whole(*run)

    def halved(self, among: SortedSequences) -> tuple[MicroBatch, MicroBatch]:
        """Its sequences in two, cut where the least is shared, among such cuts nearest to the middle of the cost."""
        members = [i for start, end in self.runs for i in range(start, end)]
        saved = [0, *(among.between(one, later) for one, later in pairwise(members))]
        behind = np.cumsum(among.lengths[members] - saved)
        cut = min(
            range(1, len(members)),
            key=lambda at: (saved[at], abs(2 * int(behind[at - 1]) - self.cost)),
        )
        parts = MicroBatch(), MicroBatch()
        for part, rows in zip(parts, (members[:cut], members[cut:]), strict=True):
            for i in rows:
                part.add((i, i + 1), part.added_cost((i, i + 1), among), among)
        return parts


def pack(sequences: Sequence[Sequence[int] | Ints], limit: int, least: int = 1) -> list[list[int]]:
    """At least `least` micro-batches, each the indices of its sequences, with at most `limit` computed tokens each.

    Best fit, the costliest families first. Where `least` asks for more, the costliest are cut in two.

    Raises:
        ValueError: a sequence is longer than `limit`, or there are fewer sequences than `least`.
    """
    arrays = [np.asarray(sequence, np.int64) for sequence in sequences]
    longest = max(map(len, arrays), default=0)
    if longest > limit or len(arrays) < least:
        raise ValueError(
            f"{len(arrays)} sequences of at most {longest} tokens are no {least} micro-batches of {limit} tokens"
        )
    order, shared = sort_by_prefix(arrays)
    among = SortedSequences(np.array([len(arrays[i]) for i in order], np.int64), np.array(shared, np.int64))
    batches: list[MicroBatch] = []
    for piece in among.pieces(0, len(order), limit) if order else []:
        added = [(batch.added_cost(piece, among), batch) for batch in batches]
        room = WHOLE * limit - among.whole(*piece)
        places = [(cost, batch) for cost, batch in added if batch.cost + cost <= limit and batch.whole <= room]
        if not places:
            batches.append(MicroBatch())
            places = [(among.cost(*piece), batches[-1])]
        cost, chosen = min(places, key=lambda one: (one[0], -one[1].cost))
        chosen.add(piece, cost, among)
    while len(batches) < least:
        divisible = [batch for batch in batches if sum(end - start for start, end in batch.runs) > 1]
        largest = max(divisible, key=lambda batch: batch.cost)
        batches.remove(largest)
        batches += largest.halved(among)
    return [sorted(order[i] for start, end in batch.runs for i in range(start, end)) for batch in batches]
