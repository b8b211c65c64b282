"""Each generated token is trained once or dropped with a reason, with the logprob and version it had."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trajectory import SessionModel, segment, session, sessions, turn

from seamless_verl.errors import ConfigError
from seamless_verl.trajectory.account import Account, DropReason
from seamless_verl.trajectory.policies import DropIfOlderThan, FreshTailOnly, MaskOlderThan, TokenPolicy, TrainAll
from seamless_verl.trajectory.records import Finish
from seamless_verl.trajectory.sequences import Assembly, SequenceLimits, TrainingSequence, assemble

POLICIES = [TrainAll(), FreshTailOnly(), *(kind(k) for kind in (MaskOlderThan, DropIfOlderThan) for k in (0, 1))]
ALL = TrainAll()
DONE = [Finish.STOP, Finish.LENGTH, Finish.TOOL_CALLS]


def trained_tokens(assembly: Assembly) -> Counter[tuple[str, int, float, int]]:
    """(turn id, id, logprob, version) of each trained token."""
    found: Counter[tuple[str, int, float, int]] = Counter()
    for sequence in assembly.sequences:
        for span in sequence.spans:
            for i in range(span.start, span.stop):
                if sequence.response_mask[i]:
                    logprob, version = float(sequence.rollout_log_probs[i]), int(sequence.weight_version[i])
                    found[(span.turn_id, int(sequence.response_ids[i]), logprob, version)] += 1
    return found


def recorded_tokens(model: SessionModel) -> Counter[tuple[str, int, float, int]]:
    return Counter(
        (recorded.turn_id, i, p, part.version)
        for recorded in model.turns
        for part in recorded.segments
        for i, p in zip(part.ids, part.logprobs, strict=True)
    )


def all_ids(sequence: TrainingSequence) -> list[int]:
    return [*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()]


def test_one_conversation_is_one_sequence() -> None:
    first, second = segment([3, 4], 5), segment([6], 6, -2.0)
    assembly = assemble(session(turn("a", [1, 2], [first]), turn("b", [1, 2, 3, 4, 5], [second])), ALL, 6)
    (sequence,) = assembly.sequences
    assert sequence.prompt_ids.tolist() == [1, 2] and sequence.response_ids.tolist() == [3, 4, 5, 6]
    assert sequence.response_mask.tolist() == [1, 1, 0, 1] and sequence.weight_version.tolist() == [5, 5, -1, 6]
    assert sequence.rollout_log_probs.tolist() == [-0.5, -0.515625, 0, -2]
    assert (sequence.leaf_id, sequence.turn_ids, assembly.account) == ("b", ("a", "b"), Account(3, 3))
    arrays = (
        sequence.prompt_ids,
        sequence.response_ids,
        sequence.response_mask,
        sequence.rollout_log_probs,
        sequence.weight_version,
    )
    assert [a.dtype for a in arrays] == [np.int32, np.int32, np.uint8, np.float32, np.int32]


def test_what_two_paths_share_is_trained_on_the_first_and_prompt_to_the_second() -> None:
    assembly = assemble(session(turn("a", [1], [2]), turn("b", [1, 2, 3], [4]), turn("c", [1, 2, 5], [6])), ALL, 0)
    sequences = [
        (sequence.leaf_id, sequence.prompt_ids.tolist(), sequence.response_ids.tolist())
        for sequence in assembly.sequences
    ]
    assert sequences == [("b", [1], [2, 3, 4]), ("c", [1, 2, 5], [6])]


def test_a_leaf_that_generated_nothing_yields_nothing_and_takes_nothing() -> None:
    assembly = assemble(session(turn("a", [1], [2]), turn("b", [1, 2, 3]), turn("c", [1, 2, 5], [6])), ALL, 0)
    assert [(sequence.leaf_id, all_ids(sequence)) for sequence in assembly.sequences] == [("c", [1, 2, 5, 6])]


def test_a_leaf_is_named_after_the_first_turn_that_ended_there() -> None:
    assembly = assemble(session(turn("a", [1], [2]), turn("b", [1, 2, 3]), turn("c", [1, 2, 3])), ALL, 0)
    assert [(sequence.leaf_id, sequence.turn_ids, all_ids(sequence)) for sequence in assembly.sequences] == [
        ("b", ("a",), [1, 2])
    ]


def test_a_cancelled_reply_is_trained_as_far_as_it_was_replayed() -> None:
    cut = turn("a", [1], [2, 3, 4], finish=Finish.CANCELLED)
    assert assemble(session(cut), ALL, 0).account == Account(3, 0, {DropReason.CANCELLED: 3})
    assembly = assemble(session(cut, turn("b", [1, 2, 3, 9], [5])), ALL, 0)
    assert [all_ids(sequence) for sequence in assembly.sequences] == [[1, 2, 3, 9, 5]]
    assert assembly.account == Account(4, 3, {DropReason.CANCELLED: 1})


def test_a_failed_turn_and_its_retry() -> None:
    assembly = assemble(session(turn("a", [1], [2], finish=Finish.FAILED), turn("b", [1], [2])), ALL, 0)
    assert [sequence.leaf_id for sequence in assembly.sequences] == ["b"]
    assert assembly.account == Account(2, 1, {DropReason.FAILED: 1})


def test_a_long_response_loses_its_tail_and_does_not_end_in_context() -> None:
    record = session(turn("a", [1], [2, 3]), turn("b", [1, 2, 3, 4, 5], [6, 7]))
    assembly = assemble(record, ALL, 0, SequenceLimits(5))
    assert [sequence.response_ids.tolist() for sequence in assembly.sequences] == [[2, 3]]
    assert assembly.account == Account(4, 2, {DropReason.TOO_LONG: 2})


def test_a_late_branch_is_trained_where_the_whole_sequence_fits() -> None:
    long = turn("a", [1], [2, 3, 4, 5, 6])
    late = turn("b", [1, 2, 3, 4, 9], [7, 8])
    record = session(long, late)
    assembly = assemble(record, ALL, 0, SequenceLimits(7))
    assert [len(sequence.prompt_ids) for sequence in assembly.sequences] == [1, 5]
    assert assembly.account == Account(7, 7)
    assert assemble(record, ALL, 0, SequenceLimits(6)).account == Account(7, 6, {DropReason.TOO_LONG: 1})
    assert assemble(record, ALL, 0, SequenceLimits(5)).account.dropped == {
        DropReason.TOO_LONG: 1,
        DropReason.PROMPT_TOO_LONG: 2,
    }


def test_what_is_too_long_is_not_held_against_what_is_left() -> None:
    record = session(turn("a", [1], [segment([2, 3], 5), segment([4], 1)]))
    assembly = assemble(record, DropIfOlderThan(0), 5, SequenceLimits(3))
    assert assembly.account == Account(3, 2, {DropReason.TOO_LONG: 1})


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_sequence=1"):
        SequenceLimits(1)


@settings(max_examples=300, deadline=None)
@given(sessions())
def test_what_is_not_trained_is_of_turns_that_did_not_finish(model: SessionModel) -> None:
    assembly = assemble(model.record(), ALL, 3)
    missing = recorded_tokens(model) - trained_tokens(assembly)
    unfinished = {recorded.turn_id for recorded in model.turns if recorded.finish in (Finish.CANCELLED, Finish.FAILED)}
    assert {turn_id for turn_id, *_ in missing} <= unfinished
    assert missing.total() == sum(assembly.account.dropped.values())
    assert not trained_tokens(assembly) - recorded_tokens(model)


@settings(max_examples=300, deadline=None)
@given(sessions())
def test_a_sequence_is_the_beginning_of_what_its_last_turn_read_and_wrote(model: SessionModel) -> None:
    by_id = {recorded.turn_id: recorded for recorded in model.turns}
    assembly = assemble(model.record(), ALL, 3)
    assert len({sequence.leaf_id for sequence in assembly.sequences}) == len(assembly.sequences)
    for sequence in assembly.sequences:
        last, leaf = by_id[sequence.turn_ids[-1]], by_id[sequence.leaf_id]
        ids = all_ids(sequence)
        assert [*last.prompt_ids, *last.generated_ids][: len(ids)] == ids
        assert [*leaf.prompt_ids, *leaf.generated_ids][: len(ids)] == ids
        assert sequence.response_mask[0] == sequence.response_mask[-1] == 1


@settings(max_examples=300, deadline=None)
@given(
    model=sessions(),
    policy=st.sampled_from(POLICIES),
    version=st.integers(0, 5),
    longest=st.none() | st.integers(2, 20),
)
def test_the_account_closes(model: SessionModel, policy: TokenPolicy, version: int, longest: int | None) -> None:
    limits = SequenceLimits(longest)
    assembly = assemble(model.record(), policy, version, limits)
    assembly.account.check_integrity()
    assert assembly.account.generated == model.generated
    assert assembly.account.trained == trained_tokens(assembly).total()
    assert not trained_tokens(assembly) - recorded_tokens(model)
    for sequence in assembly.sequences:
        assert 0 < len(sequence.response_ids) <= (limits.max_sequence or 1000) - len(sequence.prompt_ids)
        inside = np.zeros(len(sequence.response_ids), bool)
        for span in sequence.spans:
            inside[span.start : span.stop] = True
            assert (sequence.weight_version[span.start : span.stop] == span.version).all()
        assert (sequence.weight_version[~inside] == -1).all() and not sequence.rollout_log_probs[~inside].any()


@settings(max_examples=200, deadline=None)
@given(first=sessions(most=5), second=sessions(most=5), order=st.randoms())
def test_the_order_of_independent_turns_changes_no_total(
    first: SessionModel, second: SessionModel, order: object
) -> None:
    """Two agents in one session: each keeps its own order, their turns fall between each other's as they may."""
    ours = [turn(e.turn_id, [7, *e.prompt_ids], e.segments, finish=e.finish) for e in first.turns]
    theirs = [turn(f"o{e.turn_id}", [8, *e.prompt_ids], e.segments, finish=e.finish) for e in second.turns]
    mixed, a, b = [], list(ours), list(theirs)
    while a or b:
        mixed.append((a if a and (not b or order.random() < 0.5) else b).pop(0))  # type: ignore[attr-defined]
    apart, together = (assemble(session(*turns), MaskOlderThan(1), 3) for turns in (ours + theirs, mixed))
    assert together.account == apart.account and trained_tokens(together) == trained_tokens(apart)
    assert sorted(map(all_ids, together.sequences)) == sorted(map(all_ids, apart.sequences))
