"""Routes with their tokens: packed, cut, joined in segments, placed in trees, and whole in training sequences."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from support.routes import CHOSEN, LAYERS, marks, row_behind, rows_of
from support.trajectory import SessionModel, sessions

from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import (
    TOKEN,
    Finish,
    Segment,
    TokenChunk,
    Turn,
    append_chunk,
    logprobs,
    merge_chunks,
    tokens,
)
from seamless_verl.trajectory.routes import Routes, joined, packed, unpacked
from seamless_verl.trajectory.sequences import SequenceLimits, assemble
from seamless_verl.trajectory.tree import Tree


def chunk(ids: list[int], version: int = 1, replica: str = "a", **more: Any) -> TokenChunk:
    """Tokens each of whose rows has the token's own id."""
    given = {"routes": rows_of(*ids)} | more
    return TokenChunk(tokens(ids), logprobs([-0.5] * len(ids)), version, replica, **given)


def turn(name: str, prompt: list[int], chunks: list[TokenChunk], known: int = 0, **more: Any) -> Turn:
    """A turn whose engine was asked for the routes of the prompt's tokens from `known` on."""
    segments: list[Segment] = []
    for one in chunks:
        append_chunk(segments, one)
    given = {"prompt_routes": rows_of(*prompt[max(1, known) :])} if prompt[max(1, known) :] else {}
    return Turn(name, array(TOKEN, prompt), segments, Finish.STOP, **{**given, **more})


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_packed_routes_are_the_same_and_take_a_byte_or_two_for_each_expert(dtype: Any) -> None:
    routes = rows_of(*range(200), dtype=dtype)
    again = Routes.unpack(routes.pack())
    assert again == routes and len(routes) == 200
    assert again.array().dtype == dtype and np.array_equal(again.array(), routes.array())
    assert len(routes.pack()) == 4 + 200 * LAYERS * CHOSEN * np.dtype(dtype).itemsize
    assert unpacked(packed(routes)) == routes and unpacked(packed(None)) is None


@pytest.mark.parametrize("data", [b"\x01", b"\x02\x00\x02\x01abc", b"\x02\x00\x02\x03abcdef", b"\x00\x00\x02\x01"])
def test_bytes_that_are_no_routes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="routes"):
        Routes.unpack(data)


def test_a_chunk_has_a_route_for_each_token() -> None:
    with pytest.raises(ValueError, match="2 routes for 3 ids"):
        chunk([1, 2, 3], routes=rows_of(1, 2))


def test_chunks_that_wait_are_read_as_one_with_all_their_routes() -> None:
    merged = merge_chunks([chunk([5, 6], prompt_routes=rows_of(3, 4)), chunk([7])])
    assert marks(merged.routes) == [5, 6, 7]
    assert marks(merged.prompt_routes) == [3, 4]


def test_segments_keep_the_routes_of_their_tokens_and_chunks_stay_as_they_were() -> None:
    first = chunk([5, 6])
    segments: list[Segment] = []
    for one in (first, chunk([7]), chunk([8], version=2)):
        append_chunk(segments, one)
    assert [marks(segment.routes) for segment in segments] == [[5, 6, 7], [8]]
    assert marks(first.routes) == [5, 6]
    assert marks(segments[0].part(1, 3).routes) == [6, 7]


@pytest.mark.parametrize("lacking", [None, Routes.of(np.zeros((1, LAYERS, CHOSEN + 1), np.uint8))])
def test_a_segment_with_rows_missing_or_of_another_model_has_none(lacking: Routes | None) -> None:
    segments: list[Segment] = []
    for one in (chunk([5]), chunk([6], routes=lacking), chunk([7])):
        append_chunk(segments, one)
    assert len(segments) == 1 and len(segments[0]) == 3 and segments[0].routes is None
    assert joined([rows_of(5), lacking]) is None


def test_a_continuation_takes_over_at_its_first_token() -> None:
    """Cut by a commit after two tokens: these keep their routes, and the position that was not computed gets one."""
    tree = Tree()
    tree.insert(turn("t", [1, 2, 3], [chunk([10, 11]), chunk([12], version=2, replica="b")]))
    (sequence,) = assemble(tree, TrainAll(), 2).sequences
    assert sequence.routes is not None
    assert marks(sequence.routes) == [2, 3, 10, 11, 12]  # of the position before each
    assert len(sequence.routes) == len(sequence.prompt_ids) + len(sequence.response_ids) - 1


def test_a_later_turn_keeps_the_routes_of_what_it_repeats() -> None:
    tree = Tree()
    tree.insert(turn("one", [1, 2, 3], [chunk([10, 11])]))
    prompt = [1, 2, 3, 10, 11, 4, 5]
    assert tree.routes_needed_from(array(TOKEN, prompt)) == 5
    again = rows_of(*[100 + token for token in prompt[1:]])  # whatever the engine chooses the second time
    tree.insert(turn("two", prompt, [chunk([12])], prompt_routes=again))
    (sequence,) = assemble(tree, TrainAll(), 1).sequences
    assert sequence.routes is not None and marks(sequence.routes) == [2, 3, 10, 11, 104, 105, 12]


def test_branches_keep_what_they_share_and_have_their_own_from_the_fork_on() -> None:
    tree = Tree()
    tree.insert(turn("one", [1, 2, 3], [chunk([10, 11, 12])]))
    fork = array(TOKEN, [1, 2, 3, 10, 20])
    assert tree.routes_needed_from(fork) == 4
    tree.insert(turn("two", fork.tolist(), [chunk([21])], known=4))
    first, second = assemble(tree, TrainAll(), 1).sequences
    assert first.routes is not None and marks(first.routes) == [2, 3, 10, 11, 12]
    assert second.routes is not None and marks(second.routes) == [2, 3, 10, 20, 21]


def test_the_prompt_of_a_call_without_tokens_gets_its_routes_from_the_next_call() -> None:
    tree = Tree()
    tree.insert(turn("cancelled", [1, 2, 3, 4], [], prompt_routes=None))
    prompt = array(TOKEN, [1, 2, 3, 9])
    assert tree.routes_needed_from(prompt) == 1
    tree.insert(turn("next", prompt.tolist(), [chunk([10])]))
    (sequence,) = assemble(tree, TrainAll(), 1).sequences
    assert sequence.routes is not None and marks(sequence.routes) == [2, 3, 9, 10]
    assert tree.routes_needed_from(array(TOKEN, [1, 2, 3, 4])) == 3  # the branch that has none


def test_a_prompt_that_was_answered_before_needs_no_routes_again() -> None:
    tree = Tree()
    tree.insert(turn("one", [1, 2, 3], [chunk([10])]))
    assert tree.routes_needed_from(array(TOKEN, [1, 2, 3])) == 3
    tree.insert(turn("two", [1, 2, 3], [chunk([11])], known=3))
    assert [marks(one.routes) for one in assemble(tree, TrainAll(), 1).sequences] == [[2, 3, 10], [2, 3, 11]]


def test_a_sequence_is_cut_with_its_routes() -> None:
    tree = Tree()
    tree.insert(turn("one", [1, 2], [chunk([10, 11, 12, 13])]))
    (sequence,) = assemble(tree, TrainAll(), 1, SequenceLimits(4)).sequences
    assert sequence.routes is not None and marks(sequence.routes) == [2, 10, 11]


def test_without_all_routes_a_sequence_has_none() -> None:
    tree = Tree()
    tree.insert(turn("one", [1, 2, 3], [chunk([10])], prompt_routes=rows_of(3)))
    (sequence,) = assemble(tree, TrainAll(), 1).sequences
    assert sequence.routes is None


def test_a_prompt_of_one_token_needs_no_routes_of_its_own() -> None:
    tree = Tree()
    assert tree.routes_needed_from(array(TOKEN, [1])) == 1
    tree.insert(turn("one", [1], [chunk([10, 11])], prompt_routes=rows_of()))
    (sequence,) = assemble(tree, TrainAll(), 1).sequences
    assert sequence.routes is not None and marks(sequence.routes) == [10, 11]


@given(model=sessions())
def test_whatever_an_agent_replays_each_position_has_its_own_route(model: SessionModel) -> None:
    """An engine is asked, as the gateway does, for what is not on record; calls without a token got no answer."""
    tree = Tree()
    for one in model.turns:
        prompt, ids = list(one.prompt_ids), [*one.prompt_ids, *one.generated_ids]
        rows = [row_behind(ids[:number]) for number in range(len(ids))]
        parts, begin = [], len(prompt)
        for part in one.segments:
            parts.append(replace(part, routes=rows_of(*rows[begin : begin + len(part)])))
            begin += len(part)
        first = tree.routes_needed_from(one.prompt_ids)
        asked = rows_of(*rows[first : len(prompt)]) if one.generated else None
        tree.insert(replace(one, segments=parts, prompt_routes=asked))
        tree.check_integrity()
    for sequence in assemble(tree, TrainAll(), 99).sequences:
        ids = [*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()]
        assert sequence.routes is not None
        assert marks(sequence.routes) == [row_behind(ids[:number]) for number in range(1, len(ids))]
