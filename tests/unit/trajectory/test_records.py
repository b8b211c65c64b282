"""Segments and merged chunks: one run for each weight version and replica, of copies of the chunks' tokens."""

from __future__ import annotations

import pytest

from seamless_verl.trajectory.records import (
    Finish,
    Segment,
    TokenChunk,
    TopLogprobs,
    append_chunk,
    empty_chunk,
    logprobs,
    merge_chunks,
    tokens,
)


def chunk(*ids: int, version: int = 1, replica: str = "a", finish: Finish | None = None) -> TokenChunk:
    return TokenChunk(tokens(ids), logprobs([-float(i) for i in ids]), version, replica, finish)


def appended(*chunks: TokenChunk) -> list[Segment]:
    segments = list[Segment]()
    for added in chunks:
        append_chunk(segments, added)
    return segments


def contents(segments: list[Segment]) -> list[tuple[list[int], list[float], int, str]]:
    return [(part.ids.tolist(), part.logprobs.tolist(), part.version, part.replica) for part in segments]


def test_segments_are_maximal_runs_of_one_version_and_replica() -> None:
    segments = appended(
        chunk(1), chunk(2, 3), chunk(4, version=2), chunk(), chunk(5, version=2), chunk(6, version=2, replica="b")
    )
    assert contents(segments) == [
        ([1, 2, 3], [-1.0, -2.0, -3.0], 1, "a"),
        ([4, 5], [-4.0, -5.0], 2, "a"),
        ([6], [-6.0], 2, "b"),
    ]
    assert appended(chunk(), empty_chunk(Finish.CUT)) == []


def test_segments_and_chunks_share_no_arrays() -> None:
    first, second = chunk(1), chunk(2)
    segments = appended(first, second)
    assert first.ids.tolist() == [1] and first.logprobs.tolist() == [-1.0], "a chunk grew with its segment"
    for array in (first.ids, second.ids):
        array.append(99)
    for array in (first.logprobs, second.logprobs):
        array.append(-99.0)
    assert contents(segments) == [([1, 2], [-1.0, -2.0], 1, "a")]


def test_a_segment_is_appended_like_a_chunk() -> None:
    copied = appended(chunk(1), chunk(2, version=2))
    (joined,) = segments = appended(chunk(1))
    append_chunk(segments, copied[0])
    assert segments[0] is joined and contents(segments)[0][0] == [1, 1] and contents(copied)[0][0] == [1]


def test_merged_chunks_are_copies_that_end_as_the_last() -> None:
    parts = [chunk(1), chunk(2, 3), chunk(4, finish=Finish.STOP)]
    merged = merge_chunks(parts)
    assert (merged.ids.tolist(), merged.logprobs.tolist()) == ([1, 2, 3, 4], [-1.0, -2.0, -3.0, -4.0])
    assert (merged.version, merged.replica, merged.finish_reason, merged.top) == (1, "a", Finish.STOP, None)
    for part in parts:
        part.ids.append(99)
        part.logprobs.append(-99.0)
    assert merged.ids.tolist() == [1, 2, 3, 4] and merged.logprobs.tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_one_chunk_is_merged_into_a_copy_of_itself() -> None:
    part = chunk(1)
    merged = merge_chunks([part])
    merged.ids.append(2)
    assert part.ids.tolist() == [1]


def test_an_end_without_tokens_keeps_the_version_and_replica_of_the_tokens() -> None:
    merged = merge_chunks([chunk(1, version=3, replica="b"), empty_chunk(Finish.LENGTH)])
    assert (merged.ids.tolist(), merged.version, merged.replica) == ([1], 3, "b")
    assert merged.finish_reason is Finish.LENGTH
    assert merge_chunks([empty_chunk(Finish.CUT), empty_chunk(Finish.LENGTH)]) == empty_chunk(Finish.LENGTH)


def test_top_logprobs_are_joined_in_order() -> None:
    entries = [TopLogprobs((i, i + 1), (-0.5, -1.0), 1) for i in range(3)]
    parts = [TokenChunk(tokens([i]), logprobs([-0.5]), 1, "a", None, None, (entry,)) for i, entry in enumerate(entries)]
    assert merge_chunks(parts).top == tuple(entries)


def test_chunks_of_two_versions_are_not_merged() -> None:
    with pytest.raises(ValueError, match="too many values"):
        merge_chunks([chunk(1), chunk(2, version=2)])
