"""Which rank computes which sequences: the same mini-batches, with the samples of a prompt together."""

from __future__ import annotations

import random
from itertools import chain

import pytest

from seamless_verl.shared_prefixes.ranks import RowLengths, computed_tokens, keep_together


def drawn_rows(rng: random.Random, groups: int, samples: int) -> list[RowLengths]:
    return [
        RowLengths(f"p{number}", prompt, prompt + rng.randint(1, 60))
        for number in range(groups)
        for prompt in [rng.randint(1, 200)]
        for _ in range(samples)
    ]


def mini_batches(order: list[int], ranks: int, steps: int) -> list[list[list[int]]]:
    size = len(order) // (ranks * steps)
    return [[order[(r * steps + s) * size :][:size] for r in range(ranks)] for s in range(steps)]


def test_of_drawn_batches_each_mini_batch_keeps_its_sequences_and_no_rank_is_busier() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        ranks, steps, samples = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 8)
        rows = drawn_rows(rng, ranks * steps * rng.randint(1, 3), samples)
        given = [*range(len(rows))]
        rng.shuffle(given)
        order = keep_together(rows, given, ranks, steps)
        for before, now in zip(mini_batches(given, ranks, steps), mini_batches(order, ranks, steps), strict=True):
            assert {*chain(*before)} == {*chain(*now)}, seed
            assert [len(share) for share in before] == [len(share) for share in now]
            costs = [[computed_tokens([rows[i] for i in share]) for share in shares] for shares in (before, now)]
            assert max(costs[1]) <= max(costs[0]), seed


def test_groups_that_verl_tore_apart_are_whole_on_their_ranks() -> None:
    rows = [RowLengths(f"p{number}", 100, 120) for number in range(4) for _ in range(4)]
    torn = [*range(0, 16, 2), *range(1, 16, 2)]
    order = keep_together(rows, torn, ranks=2, steps=1)
    assert [{rows[i].prompt for i in order[half : half + 8]} for half in (0, 8)] == [{"p0", "p2"}, {"p1", "p3"}]


def test_a_group_is_cut_where_ranks_have_room_for_no_whole_one() -> None:
    rows = [RowLengths(f"p{number}", 100, 120) for number in range(3) for _ in range(4)]
    torn = [*range(0, 12, 2), *range(1, 12, 2)]
    order = keep_together(rows, torn, ranks=2, steps=1)
    assert sorted(len({rows[i].prompt for i in order[half : half + 6]}) for half in (0, 6)) == [2, 2]


def test_sequences_that_are_no_mini_batches_are_an_error() -> None:
    with pytest.raises(ValueError, match="12 sequences for 2 ranks with 4 mini-batches"):
        keep_together([RowLengths("p", 1, 2)] * 12, range(12), ranks=2, steps=4)


def test_of_a_later_sequence_of_a_session_only_the_group_s_prompt_is_shared() -> None:
    """What came before it in the session is its prompt, which no other sample has."""
    rows = [RowLengths("p", prompt, prompt + 50) for _ in range(4) for prompt in (100, 2000)]
    assert computed_tokens(rows) == 100 + 4 * (50 + 1900 + 50)


def test_a_single_long_prompt_stays_on_both_ranks() -> None:
    rows = [RowLengths("p", 500, 510) for _ in range(8)]
    assert keep_together(rows, [0, 2, 4, 6, 1, 3, 5, 7], ranks=2, steps=1) == [0, 2, 4, 6, 1, 3, 5, 7]
