"""A session takes each turn once, ends once, and keeps every token of what it took."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from support.trajectory import ids, next_prompt, segment, session, turn

from seamless_verl.errors import SeamlessError, SessionClosedError, TurnConflictError
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.records import Finish, Turn
from seamless_verl.trajectory.sequences import assemble
from seamless_verl.trajectory.session import Closed, SessionRecord


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (turn("a", [1], [3]), "reply"),
        (turn("a", [1, 1], [2]), "prompt"),
        (turn("a", [1], [2], finish=Finish.FAILED), "end"),
    ],
)
def test_another_turn_under_the_same_id_is_refused(other: Turn, difference: str) -> None:
    with pytest.raises(TurnConflictError, match=f"u/0: turn_id='a' is on record with another {difference}"):
        session(turn("a", [1], [2])).add_turn(other)


def test_a_closed_session_takes_no_turn_and_no_other_end() -> None:
    record = session()
    record.close(Closed.EXPIRED)
    record.close(Closed.EXPIRED)
    with pytest.raises(SessionClosedError, match=r"u/0 is closed \(expired\) and takes no turns"):
        record.add_turn(turn("a", [1], [2]))
    with pytest.raises(SessionClosedError, match=r"no other end \(finished\)"):
        record.close(Closed.FINISHED)
    record.post_reward(0.5)
    assert record.rewards == {"reward": 0.5} and not record.turns


def test_a_reward_is_a_number() -> None:
    with pytest.raises(ValueError, match="reward=nan"):
        session().post_reward(float("nan"))


@pytest.mark.parametrize("error", [SessionClosedError("u/0", "failed", "turns"), TurnConflictError("u/0", "a", "end")])
def test_errors_cross_processes(error: SeamlessError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)


class Sessions(RuleBasedStateMachine):
    """A session against plain lists of what it was given."""

    turns_given = Bundle("turns_given")

    def __init__(self) -> None:
        super().__init__()
        self.record = SessionRecord("u", "0")
        self.taken: list[Turn] = []
        self.rewards: dict[str, float] = {}
        self.closed: Closed | None = None

    def draw_turn(self, data: st.DataObject) -> Turn:
        prompt = next_prompt(data.draw, self.taken) or [0]
        parts = [segment(data.draw(ids()), version) for version in range(data.draw(st.integers(0, 2)))]
        finish = data.draw(st.sampled_from(Finish))
        return turn(f"t{len(self.taken)}", prompt, parts, finish=finish)

    @precondition(lambda self: self.closed is None)
    @rule(target=turns_given, data=st.data())
    def add(self, data: st.DataObject) -> Turn:
        new = self.draw_turn(data)
        self.record.add_turn(new)
        self.taken.append(new)
        return new

    @precondition(lambda self: self.closed is not None)
    @rule(data=st.data())
    def add_when_closed(self, data: st.DataObject) -> None:
        with pytest.raises(SessionClosedError):
            self.record.add_turn(self.draw_turn(data))

    @rule(old=turns_given)
    def add_again(self, old: Turn) -> None:
        assert self.record.add_turn(old).turn_id == old.turn_id

    @rule(old=consumes(turns_given), more=st.integers(0, 2))
    def add_another_under_its_id(self, old: Turn, more: int) -> None:
        changed = turn(old.turn_id, old.prompt_ids, [*old.segments, segment([more])], finish=old.finish)
        with pytest.raises(TurnConflictError):
            self.record.add_turn(changed)

    @rule(value=st.floats(-2, 2), name=st.sampled_from(["reward", "style"]))
    def reward(self, value: float, name: str) -> None:
        self.record.post_reward(value, name)
        self.rewards[name] = value

    @rule(reason=st.sampled_from(Closed))
    def close(self, reason: Closed) -> None:
        if self.closed in (None, reason):
            self.record.close(reason)
            self.closed = reason
        else:
            with pytest.raises(SessionClosedError):
                self.record.close(reason)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.record.check_integrity()
        assert [placed.turn_id for placed in self.record.turns] == [recorded.turn_id for recorded in self.taken]
        assert all(self.record.tree.turns[e.turn_id].generated_ids() == e.generated_ids for e in self.taken)
        assert (self.record.rewards, self.record.closed) == (self.rewards, self.closed)
        assert self.record.is_open == (self.closed is None)

    @invariant()
    def the_account_closes(self) -> None:
        account = assemble(self.record, TrainAll(), 1).account
        assert account.generated == sum(recorded.generated for recorded in self.taken)


Sessions.TestCase.settings = settings(max_examples=40, deadline=None, stateful_step_count=20)
TestSessions = Sessions.TestCase
