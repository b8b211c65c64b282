"""A validation beside training runs in turns with it, and is taken once its groups have ended, batch after batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seamless_verl.runtime.step_metrics import VALIDATED
from seamless_verl.trainer.validation import LATER, InTurns, ValidationBeside


class Buffer:
    """The replay buffer as far as a validation needs it: `ended` are groups, of which a look sees the next `arrive`."""

    def __init__(self, arrive: list[int]) -> None:
        self.arrive, self.seen = arrive, 0
        self.validated: list[int] = []
        self.before_validated: Callable[[int], None] | None = None

    def outstanding(self) -> None:
        self.seen += self.arrive.pop(0) if self.arrive else 1

    def validated_groups(self) -> int:
        return self.seen

    def sample(self, number: int) -> None:
        if self.before_validated is not None:
            self.before_validated(number)
        assert self.seen >= number
        self.seen -= number
        self.validated += [8] * number


class Run:
    """A run that validates batches of these sizes, and notes whose turn it was."""

    def __init__(self, batches: list[int], arrive: list[int]) -> None:
        self.buffer, self.batches, self.turns = Buffer(arrive), batches, list[str]()
        self.submitted, self.waits, self.stages = 0, 0, list[str]()
        buffer: Any = self.buffer
        self.validation = ValidationBeside(buffer, self.wait, self.stages.append)

    def wait(self) -> None:
        self.waits += 1

    def validate(self) -> dict[str, float]:
        for number in self.batches:
            self.turns.append("validation")
            self.submitted += number
            self.buffer.sample(number)
            assert self.validation.works
            self.turns.append("validation")
        return {"val-core/reward": 0.5}


def test_work_and_owner_run_in_turns() -> None:
    turns = list[str]()

    def work() -> int:
        turns.append("work")
        running.pause()
        turns.append("work again")
        return 3

    running = InTurns("work", work)
    assert turns == []
    running.proceed()
    assert turns == ["work"] and not running.ended
    turns.append("owner")
    running.proceed()
    assert turns == ["work", "owner", "work again"] and running.ended and running.result() == 3


def test_what_work_raises_its_owner_hears() -> None:
    def work() -> None:
        running.pause()
        raise ValueError("of verl's")

    running = InTurns("work", work)
    running.proceed()
    running.proceed()
    with pytest.raises(ValueError, match="of verl's"):
        running.result()


def test_it_is_taken_once_its_groups_have_ended() -> None:
    run = Run([4], arrive=[3, 1])
    run.validation.begin(6, run.validate)
    assert run.submitted == 4 and run.validation.take() == {} and not run.validation.works
    run.buffer.outstanding()
    assert run.validation.take() == {}, "one group is missing"
    run.buffer.outstanding()
    assert run.validation.take() == {"val-core/reward": 0.5, VALIDATED: 6.0, LATER: 2.0}
    assert run.validation.take() == {}
    assert run.buffer.before_validated is None, "the next one may be waited for"


def test_an_end_waits_for_it() -> None:
    run = Run([4, 2], arrive=[3])
    assert run.validation.end() == {} and run.stages == []
    run.validation.begin(6, run.validate)
    assert run.validation.end()[VALIDATED] == 6 and run.stages == ["validating, step 6"]
    assert run.submitted == 6 and run.waits > 0 and run.validation.end() == {}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.lists(st.integers(0, 6), max_size=12), st.data())
def test_batches_follow_one_another_whatever_ends_when(batches: list[int], arrive: list[int], data: Any) -> None:
    run = Run(batches, arrive)
    run.validation.begin(1, run.validate)
    taken = dict[str, float]()
    for _ in range(data.draw(st.integers(0, 20))):
        run.turns.append("trainer")
        run.buffer.outstanding()
        if taken := run.validation.take():
            break
    assert (taken or run.validation.end())[VALIDATED] == 1
    assert run.submitted == sum(batches) == len(run.buffer.validated)
    assert run.turns.count("validation") == 2 * len(batches)
