"""Tokens that were sampled under a grammar keep their labels, and a setting says which of them are trained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trajectory import session, turn

from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.policies import DropIfOlderThan, GrammarTokens, MaskOlderThan, TrainAll
from seamless_verl.trajectory.records import (
    Grammar,
    Segment,
    TokenChunk,
    append_chunk,
    logprobs,
    merge_chunks,
    tokens,
)
from seamless_verl.trajectory.sequences import SequenceLimits, assemble

N, C, F = Grammar
LABELS = st.lists(st.sampled_from(Grammar), max_size=6).map(bytes)


def segment(ids: list[int], labels: list[Grammar], version: int = 0) -> Segment:
    return Segment(tokens(ids), logprobs([-1.0] * len(ids)), version, "r", bytearray(labels))


def chunk(labels: bytes, *, plain: bool = False) -> TokenChunk:
    ids = tokens(range(len(labels)))
    return TokenChunk(ids, logprobs([-1.0] * len(ids)), 0, "r", grammar=b"" if plain else labels)


def masks(labels: list[Grammar], policy: GrammarTokens) -> tuple[list[list[int]], Account]:
    record = session(turn("a", [1], [segment(list(range(2, 2 + len(labels))), labels)]))
    assembly = assemble(record, TrainAll(), 0, grammar=policy)
    assembly.account.check_integrity()
    return [sequence.response_mask.tolist() for sequence in assembly.sequences], assembly.account


@pytest.mark.parametrize(
    ("policy", "mask", "dropped"),
    [
        (GrammarTokens.TRAIN_ALL, [1, 1, 1, 1, 1], {}),
        (GrammarTokens.MASK_FORCED, [1, 1, 0, 1, 1], {DropReason.FORCED: 1}),
        (GrammarTokens.MASK_ALL, [1, 0, 0, 0, 1], {DropReason.FORCED: 1, DropReason.GRAMMAR: 2}),
    ],
)
def test_a_setting_says_which_are_trained(
    policy: GrammarTokens, mask: list[int], dropped: dict[DropReason, int]
) -> None:
    found, account = masks([N, C, F, C, N], policy)
    assert (found, account) == ([mask], Account(5, sum(mask), dropped))


def test_the_last_token_is_trained_where_others_are_since_it_gets_the_reward() -> None:
    assert masks([C, F, F], GrammarTokens.MASK_FORCED) == ([[1, 0, 1]], Account(3, 2, {DropReason.FORCED: 1}))
    assert masks([F, F], GrammarTokens.MASK_FORCED) == ([], Account(2, 0, {DropReason.FORCED: 2}))
    assert masks([C, F], GrammarTokens.MASK_ALL)[1] == Account(2, 0, {DropReason.FORCED: 1, DropReason.GRAMMAR: 1})


def test_the_limits_come_first_and_the_staleness_last() -> None:
    segments = [segment([2, 3], [F, C], version=1), segment([4, 5, 6], [F, N, F], version=3)]
    record = session(turn("a", [1], segments))
    assembly = assemble(record, MaskOlderThan(1), 3, SequenceLimits(max_sequence=5))
    (sequence,) = assembly.sequences
    assert sequence.response_mask.tolist() == [0, 0, 0, 1] and sequence.grammar.tolist() == [F, C, F, N]
    dropped = {DropReason.FORCED: 2, DropReason.STALE: 1, DropReason.TOO_LONG: 1}
    assert assembly.account == Account(5, 1, dropped)


def test_a_stale_token_that_is_not_trained_anyway_drops_no_sequence() -> None:
    record = session(turn("a", [1], [segment([2], [F], version=1), segment([3], [N], version=3)]))
    assert assemble(record, DropIfOlderThan(0), 3).account == Account(2, 1, {DropReason.FORCED: 1})


def test_labels_stay_with_their_tokens_where_a_conversation_forks() -> None:
    record = session(turn("a", [1], [segment([2, 3, 4], [F, C, F])]), turn("b", [1, 2, 9], [5]))
    first, second = assemble(record, TrainAll(), 0).sequences
    assert (first.response_ids.tolist(), first.grammar.tolist()) == ([2, 3, 4], [F, C, F])
    assert (second.response_ids.tolist(), second.grammar.tolist()) == ([5], [N])


@given(parts=st.lists(st.tuples(LABELS, st.booleans()), min_size=1, max_size=6))
def test_chunks_with_and_without_labels_are_one_segment_and_one_chunk(parts: list[tuple[bytes, bool]]) -> None:
    chunks = [chunk(labels, plain=plain) for labels, plain in parts]
    expected = b"".join(bytes(len(labels)) if plain else labels for labels, plain in parts)
    segments = list[Segment]()
    for part in chunks:
        append_chunk(segments, part)
    for found in (merge_chunks(chunks).grammar, *(bytes(one.grammar) for one in segments)):
        assert (found or bytes(len(expected))) == expected


def test_a_segment_is_cut_with_its_labels() -> None:
    whole = segment([1, 2, 3], [N, C, F])
    assert whole.part(1, 3) == segment([2, 3], [C, F])
    assert whole.part(1, 3).chunk().grammar == bytes([C, F])


def test_as_many_labels_as_tokens_or_none() -> None:
    with pytest.raises(ValueError, match="2 grammar labels for 1 ids; give one per id, or none"):
        segment([1], [N, C])
