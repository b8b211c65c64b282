"""Which sequences share a micro-batch: families whole, limits kept, cut where the least is shared."""

from __future__ import annotations

import random

import pytest
from support.drawn_forests import drawn_tree

from seamless_verl.shared_prefixes.layout import build_forest
from seamless_verl.shared_prefixes.packing import pack


def computed(sequences: list[list[int]], members: list[int]) -> int:
    return len(build_forest([sequences[i] for i in members]).tokens)


def group(prompt: int, samples: int, answer: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    begin = [rng.randrange(10**9) for _ in range(prompt)]
    return [begin + [rng.randrange(10**9) for _ in range(answer)] for _ in range(samples)]


@pytest.mark.parametrize("block", range(10))
def test_of_random_forests_each_sequence_is_in_one_micro_batch_which_keeps_the_limit(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        rng = random.Random(seed)
        ids = rng.choice((2, 5, 100))
        sequences = [s for _ in range(4) for s in drawn_tree(rng, rng.randrange(7), ids)][:40]
        rng.shuffle(sequences)
        limit = max(map(len, sequences), default=1) + rng.randrange(60)
        least = rng.randint(1, max(1, len(sequences)))
        if not sequences:
            continue
        batches = pack(sequences, limit, least)
        assert sorted(i for batch in batches for i in batch) == list(range(len(sequences))), seed
        assert all(batch for batch in batches) and len(batches) >= least
        assert all(computed(sequences, batch) <= limit for batch in batches), seed


def test_groups_stay_whole_whatever_their_order() -> None:
    rows = [(number, row) for number in range(6) for row in group(50, 8, 10, number)]  # 130 computed tokens each
    random.Random(3).shuffle(rows)
    batches = pack([row for _, row in rows], limit=300)
    assert [len({rows[i][0] for i in batch}) for batch in batches] == [2, 2, 2]


def test_a_group_that_does_not_fit_is_cut_where_the_least_is_shared() -> None:
    one, other = group(20, 1, 30, 1)[0], group(20, 1, 30, 1)[0][:20]
    branches = [[*one, 7], [*one, 8], other + [9] * 30, [*other, *[9] * 29, 4]]
    assert sorted(pack(branches, limit=60)) == [[0, 1], [2, 3]]


def test_pieces_of_a_large_group_share_micro_batches() -> None:
    """100 samples of 40 + 10 tokens are 1,040 computed ones: at a limit of 250 five micro-batches, not ten."""
    batches = pack(group(40, 100, 10, 5), limit=250)
    assert [len(batch) for batch in batches] == [21, 21, 21, 21, 16]


def test_a_header_that_all_begin_with_breaks_no_group() -> None:
    header = list(range(30))
    rows = [header + row for number in range(4) for row in group(50, 4, 10, number)]  # 90 each, and 30 once
    assert [len({i // 4 for i in batch}) for batch in pack(rows, limit=210)] == [2, 2]


def test_long_prompts_of_many_samples_are_bounded_by_what_attention_sees() -> None:
    """100 samples of 4,000 + 50 tokens are 9,000 computed ones, but their keys are those of 405,000."""
    batches = pack(group(4000, 100, 50, 5), limit=9000)
    assert max(len(batch) for batch in batches) == 8 * 9000 // 4050
    assert [len(batch) for batch in pack(group(4000, 8, 50, 5), limit=9000)] == [8]


def test_a_trunk_with_very_many_branches_is_cut_one_by_one() -> None:
    trunk = list(range(2000))
    batches = pack([[*trunk[: n + 1], 5000 + n] for n in range(2000)], limit=2100)
    assert sorted(i for batch in batches for i in batch) == list(range(2000))


def test_more_micro_batches_than_needed_are_made_at_the_cheapest_cut() -> None:
    rows = [row for number in range(4) for row in group(50, 4, 10, number)]
    assert len(pack(rows, limit=1000)) == 1
    batches = pack(rows, limit=1000, least=2)
    assert [len({i // 4 for i in batch}) for batch in batches] == [2, 2]
    assert len(pack(rows, limit=1000, least=16)) == 16


def test_what_cannot_be_packed_is_an_error() -> None:
    with pytest.raises(ValueError, match="at most 5 tokens are no 1 micro-batches of 4"):
        pack([[1] * 5], limit=4)
    with pytest.raises(ValueError, match=r"1 sequences .* 2 micro-batches"):
        pack([[1] * 5], limit=9, least=2)
    assert pack([], limit=9, least=0) == []
