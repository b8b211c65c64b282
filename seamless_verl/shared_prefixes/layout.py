"""The forest of a micro-batch: its sequences merged by their longest common prefixes, so that each token stands once.

Rows are the forest's tokens in depth-first order. A segment is a run of rows without a branch; its parent is the
segment that it continues. The edge into a row leads from the row before it on its path, whose hidden state predicts it.
So a row at a branch has one hidden state and an edge to each of its children, and every row but a path's first has one
edge.

Invariants, which `Forest.check_integrity` asserts:
- a row comes behind the row before it, and its position is one more;
- a segment's rows are consecutive, and the row before its first is the last of its parent;
- no two rows have the same token and the same row before;
- each row is on the path of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
ROOT = -1  # what stands before a path's first row, and what a segment at a root continues


@dataclass(frozen=True)
class Forest:
    """Sequences whose common prefixes stand once.

    `tokens`, `before` and `positions` are [rows]: the id, the row before on the path (ROOT: none), and the number of
    rows before. `paths` holds, for each sequence in the order given, the rows of its tokens, [its length].
    """

    tokens: Ints
    before: Ints
    positions: Ints
    paths: tuple[Ints, ...]

    @cached_property
    def starts(self) -> Ints:
        """The first row of each segment, [segments]."""
        if not len(self.tokens):
            return np.zeros(0, np.int64)
        follows = self.before == np.arange(len(self.before)) - 1
        return np.flatnonzero(~follows | (self.before == ROOT) | (self._children[self.before] > 1))

    @cached_property
    def lengths(self) -> list[int]:
        """Rows of each segment."""
        ends: list[int] = np.diff(self.starts, append=len(self.tokens)).tolist()
        return ends

    @cached_property
    def parents(self) -> list[int]:
        """The segment that each segment continues, or ROOT; it comes earlier."""
        before = self.before[self.starts]
        found = np.searchsorted(self.starts, before, side="right") - 1
        parents: list[int] = np.where(before == ROOT, ROOT, found).tolist()
        return parents

    @cached_property
    def ancestors(self) -> list[list[int]]:
        """For each segment, those that it continues, from the root on."""
        chains: list[list[int]] = []
        for parent in self.parents:
            chains.append([] if parent == ROOT else [*chains[parent], parent])
        return chains

    @cached_property
    def seen(self) -> Ints:
        """The rows that each segment's last row sees, one segment's behind another's: its ancestors', then its own."""
        own = [np.arange(start, start + length) for start, length in zip(self.starts, self.lengths, strict=True)]
        return join([own[i] for segment, above in enumerate(self.ancestors) for i in (*above, segment)])

    @cached_property
    def seen_lengths(self) -> list[int]:
        """How many of these are each segment's."""
        return [sum(self.lengths[i] for i in (*above, own)) for own, above in enumerate(self.ancestors)]

    @cached_property
    def edges(self) -> Ints:
        """The rows into which an edge leads, ascending: all but the first of each path, [edges]."""
        return np.flatnonzero(self.before != ROOT)

    @cached_property
    def sources(self) -> Ints:
        """For each edge the row whose hidden state predicts it, [edges]."""
        return self.before[self.edges]

    @cached_property
    def labels(self) -> Ints:
        """For each edge the token that is predicted, [edges]."""
        return self.tokens[self.edges]

    @cached_property
    def edge_paths(self) -> list[Ints]:
        """For each sequence, which edge each of its tokens but the last leads to, [its length - 1]."""
        numbers = np.cumsum(self.before != ROOT) - 1
        return [numbers[path[1:]] for path in self.paths]

    def edges_into(self, last: Iterable[int]) -> Ints:
        """The edges that lead to the last so many tokens of each sequence, ascending; `last` is [sequences]."""
        found: npt.NDArray[np.bool_] = np.zeros(len(self.edges), bool)
        for edges, count in zip(self.edge_paths, last, strict=True):
            found[edges[max(0, len(edges) - count) :]] = True
        return np.flatnonzero(found)

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return max((len(path) for path in self.paths), default=0)

    @property
    def saved(self) -> int:
        """Tokens of the sequences that are not computed again."""
        return sum(len(path) for path in self.paths) - len(self.tokens)

    @cached_property
    def _children(self) -> npt.NDArray[np.intp]:
        """How many edges leave each row, [rows]."""
        return np.bincount(self.before[self.before != ROOT], minlength=len(self.before))

    def padded(self, multiple: int) -> Forest:
        """With rows that no sequence has, each a segment at a root, so that the rows are a multiple of this."""
        more: Ints = np.zeros(-len(self.tokens) % multiple, np.int64)
        tokens, positions = join([self.tokens, more]), join([self.positions, more])
        return Forest(tokens, join([self.before, more + ROOT]), positions, self.paths)

    def check_integrity(self) -> None:
        """Asserts the invariants of this module."""
        rows = np.arange(len(self.tokens))
        assert (self.before < rows).all()
        assert (self.positions == np.where(self.before == ROOT, 0, self.positions[self.before] + 1)).all()
        assert sum(self.lengths) == len(rows)
        for start, parent in zip(self.starts, self.parents, strict=True):
            assert self.before[start] == (ROOT if parent == ROOT else self.starts[parent] + self.lengths[parent] - 1)
        assert len({*zip(self.before.tolist(), self.tokens.tolist(), strict=True)}) == len(rows)
        assert {int(row) for path in self.paths for row in path} == set(rows.tolist())


def build_forest(sequences: Sequence[Sequence[int] | Ints]) -> Forest:
    """The forest of sequences of token ids, any of which may be empty or equal to another.

    In sorted order each appends what is new to the path of the one before it, in depth-first order.
    """
    arrays = [np.asarray(sequence, np.int64) for sequence in sequences]
    paths: dict[int, Ints] = {}
    tokens: list[Ints] = []
    before: list[Ints] = []
    rows = 0
    path: Ints = np.zeros(0, np.int64)
    for index, shared in zip(*sort_by_prefix(arrays), strict=True):
        new = arrays[index]
        added = np.arange(rows, rows + len(new) - shared)
        if len(added):
            tokens.append(new[shared:])
            before.append(np.concatenate([path[shared - 1 : shared] if shared else [ROOT], added[:-1]]))
        path = np.concatenate([path[:shared], added])
        paths[index] = path
        rows += len(added)
    return Forest(
        join(tokens), join(before), positions_of(rows, paths.values()), tuple(paths[i] for i in range(len(arrays)))
    )


def sort_by_prefix(sequences: Sequence[Ints]) -> tuple[list[int], list[int]]:
    """The indices of the sequences in the order of their ids, and how many ids each begins with like the one before.

    In this order a sequence shares its longest prefix with its neighbours, and a prefix precedes what continues it.
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    shared = [common_prefix(sequences[i], sequences[j]) for i, j in pairwise(order)]
    return order, [0, *shared][: len(order)]


def common_prefix(one: Ints, other: Ints) -> int:
    """How many ids both begin with."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def positions_of(rows: int, paths: Iterable[Ints]) -> Ints:
    """The position of each row on every path that it is on, [rows]."""
    positions: Ints = np.zeros(rows, np.int64)
    for path in paths:
        positions[path] = np.arange(len(path))
    return positions


def join(parts: list[Ints]) -> Ints:
    """The parts as one array; without parts an empty one."""
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
