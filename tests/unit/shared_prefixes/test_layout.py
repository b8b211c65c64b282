"""Sequences that are merged by their common prefixes, and given back."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.drawn_forests import drawn_tree

from seamless_verl.shared_prefixes.layout import ROOT, build_forest


def drawn_forest(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    ids = rng.choice((2, 5, 100))
    sequences = [s for _ in range(rng.randrange(4)) for s in drawn_tree(rng, rng.randrange(7), ids)][:40]
    sequences += rng.choices(sequences, k=rng.randrange(3)) if sequences else [[7]] * rng.randrange(3)
    rng.shuffle(sequences)
    return sequences


@pytest.mark.parametrize("block", range(10))
def test_of_a_thousand_random_forests_every_sequence_comes_back_and_every_prefix_stands_once(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        sequences = drawn_forest(seed)
        forest = build_forest(sequences)
        forest.check_integrity()
        assert [forest.tokens[path].tolist() for path in forest.paths] == sequences, seed
        assert [forest.positions[path].tolist() for path in forest.paths] == [[*range(len(s))] for s in sequences]
        prefixes = {tuple(s[: n + 1]) for s in sequences for n in range(len(s))}
        assert len(forest.tokens) == len(prefixes), seed
        assert forest.saved == sum(map(len, sequences)) - len(prefixes)
        assert forest.longest == max(map(len, sequences), default=0)


@pytest.mark.parametrize("block", range(10))
def test_the_edges_of_a_path_lead_from_each_token_to_the_next(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        sequences = drawn_forest(seed)
        forest = build_forest(sequences)
        for sequence, path, edges in zip(sequences, forest.paths, forest.edge_paths, strict=True):
            assert forest.labels[edges].tolist() == sequence[1:]
            assert forest.sources[edges].tolist() == path[:-1].tolist()
        assert len(forest.edges) == len({tuple(s[: n + 1]) for s in sequences for n in range(1, len(s))})


@pytest.mark.parametrize("block", range(10))
def test_what_leads_to_the_ends_of_sequences_and_what_segments_see(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        sequences, rng = drawn_forest(seed), random.Random(seed)
        forest = build_forest(sequences)
        last = [rng.randrange(len(s) + 2) for s in sequences]
        ends = {
            tuple(s[: n + 1])
            for s, count in zip(sequences, last, strict=True)
            for n in range(1, len(s))
            if n >= len(s) - count
        }
        found = forest.edges_into(last)
        assert len(found) == len(ends) and (np.diff(found) > 0).all()
        chosen = {int(edge) for edge in found}
        for path, edges, count in zip(forest.paths, forest.edge_paths, last, strict=True):
            assert {int(edge) for edge in edges[max(0, len(edges) - count) :]} <= chosen, len(path)
        bounds = np.cumsum([0, *forest.seen_lengths])
        assert len(forest.seen) == bounds[-1]
        for segment, start in enumerate(forest.starts):
            row, expected = int(start) + forest.lengths[segment] - 1, list[int]()
            while row != ROOT:
                expected.insert(0, row)
                row = int(forest.before[row])
            assert forest.seen[bounds[segment] : bounds[segment + 1]].tolist() == expected


@pytest.mark.parametrize("block", range(10))
def test_a_path_is_whole_segments_and_the_beginning_of_one(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        forest = build_forest(drawn_forest(seed))
        segment_of = np.repeat(np.arange(len(forest.lengths)), forest.lengths)
        for path in forest.paths:
            if len(path):
                last = segment_of[path[-1]]
                chain = [*forest.ancestors[last], last]
                rows = [forest.starts[s] + i for s in chain for i in range(forest.lengths[s])]
                assert rows[: len(path)] == path.tolist()
                assert len(rows) - len(path) < forest.lengths[last]


def test_a_group_shares_its_prompt() -> None:
    forest = build_forest([[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 4]])
    assert forest.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert (forest.lengths, forest.parents, forest.ancestors) == ([3, 1, 2], [ROOT, 0, 0], [[], [0], [0]])
    assert forest.positions.tolist() == [0, 1, 2, 3, 3, 4]
    assert (forest.sources.tolist(), forest.labels.tolist()) == ([0, 1, 2, 2, 4], [2, 3, 4, 5, 6])
    assert [edges.tolist() for edges in forest.edge_paths] == [[0, 1, 2], [0, 1, 3, 4], [0, 1, 2]]
    assert forest.saved == 7


@pytest.mark.parametrize("sequences", [[], [[]], [[], []], [[], [3]], [[3], [3]], [[3], [3, 4], [3, 4, 5]]])
def test_the_smallest_forests(sequences: list[list[int]]) -> None:
    forest = build_forest(sequences)
    forest.check_integrity()
    assert [forest.tokens[path].tolist() for path in forest.paths] == sequences
    assert len(forest.lengths) == bool(forest.longest), "a sequence that ends on the way breaks no segment"


def test_rows_that_fill_a_forest_up_change_no_edge() -> None:
    forest = build_forest([[1, 2, 3], [1, 2, 4]])
    padded = forest.padded(3)
    assert (padded.tokens.tolist(), padded.before.tolist()) == ([1, 2, 3, 4, 0, 0], [ROOT, 0, 1, 1, ROOT, ROOT])
    assert padded.lengths == [2, 1, 1, 1, 1] and padded.parents == [ROOT, 0, 0, ROOT, ROOT]
    assert padded.edges.tolist() == forest.edges.tolist() and padded.paths == forest.paths
    assert forest.padded(4).tokens.tolist() == forest.tokens.tolist()


def test_a_forest_in_which_nothing_is_shared_has_every_token() -> None:
    forest = build_forest([[2, 3], [1, 3]])
    assert (forest.saved, forest.parents, len(forest.edges)) == (0, [ROOT, ROOT], 2)
