"""A session as text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.trajectory import SessionModel, segment, session, sessions, turn

from seamless_verl.tools.trajectories.session_text import format_session
from seamless_verl.trajectory.account import DropReason
from seamless_verl.trajectory.policies import MaskOlderThan, TrainAll
from seamless_verl.trajectory.records import Finish
from seamless_verl.trajectory.sequences import SequenceLimits, assemble
from seamless_verl.trajectory.session import Closed, SessionRecord


def example() -> SessionRecord:
    record = session(
        turn("a", [1, 1], [segment([2, 3], 4), segment([4], 5, replica="r1")]),
        turn("b", [1, 1, 2, 3, 4, 6], [segment([7], 5)]),
        turn("c", [1, 1, 2, 9, 9], [segment([7], 5)]),
        turn("d", [1, 1, 2, 9, 9], [segment([7], 5)], finish=Finish.CANCELLED),
    )
    record.post_reward(1)
    record.close(Closed.FINISHED)
    return record


def test_the_tree_as_text() -> None:
    assert format_session(example(), MaskOlderThan(0), 5).splitlines() == [
        "session u/0 finished reward=1: 4 turns, 6 tokens generated",
        "context 2",
        "generated 1 by a v4 on r0: trained 0/1 stale",
        "|- generated 1 by a v4 on r0: trained 0/1 stale",
        "|  generated 1 by a v5 on r1: trained 1/1",
        "|  context 1",
        "|  generated 1 by b v5 on r0: trained 1/1  => sequence b: prompt 2, response 5",
        "`- context 2",
        "   |- generated 1 by c v5 on r0: trained 1/1  => sequence c: prompt 5, response 1",
        "   `- generated 1 by d v5 on r0: trained 0/1 cancelled",
        "drift: c left b at token 3 (agent_edit): 3 generated tokens no longer its context, 1 still are; "
        "recorded [3, 4, 6, 7], replayed [9, 9]",
    ]


def test_nothing_is_trained_of_a_session_that_was_dropped() -> None:
    """A validation's, too: the account below the tree says the same."""
    lines = format_session(example(), MaskOlderThan(0), 5, dropped=DropReason.VALIDATION).splitlines()
    assert "generated 1 by a v4 on r0: trained 0/1 stale+validation" in lines
    assert "   |- generated 1 by c v5 on r0: trained 0/1 validation" in lines
    assert not any("=> sequence" in line or "trained 1/" in line for line in lines)


def test_an_empty_session_as_text() -> None:
    assert format_session(session(), TrainAll(), 0) == "session u/0 open: 0 turns, 0 tokens generated"


@settings(max_examples=150, deadline=None)
@given(sessions(), st.integers(0, 4), st.none() | st.integers(2, 16))
def test_the_text_shows_what_is_trained(model: SessionModel, version: int, longest: int | None) -> None:
    record, policy, limits = model.record(), MaskOlderThan(1), SequenceLimits(longest)
    assembly = assemble(record, policy, version, limits)
    lines = format_session(record, policy, version, limits).splitlines()
    counts = [line.split("trained ")[1].split()[0].split("/") for line in lines if "trained " in line]
    assert sum(int(trained) for trained, _ in counts) == assembly.account.trained
    assert sum(int(generated) for _, generated in counts) == assembly.account.generated
    assert sum("=> sequence" in line for line in lines) == len(assembly.sequences)
    assert all(("stale" in line or "too_long" in line) <= bool(assembly.account.dropped) for line in lines)
