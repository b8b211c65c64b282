"""Tail batching: every prompt is trained once an epoch, whichever groups finish first, and no resume loses one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from seamless_verl.resources.tail_batching import Draw, TailBatching, extra_prompts


@dataclass
class Run:
    """A run of steps of `batch` prompts on `epoch` prompts in order; a prompt's name says where in the data it is.

    `finish` orders a step's prompts by their finish. A prompt that is in `failing` is dropped when it ends the first
    time, and another one takes its place.
    """

    policy: TailBatching
    batch: int
    epoch: int
    steps: int
    finish: Callable[[list[str]], list[str]]
    failing: set[str] = field(default_factory=set)
    step: int = 0
    dropped: list[str] = field(default_factory=list)
    trained: list[list[str]] = field(default_factory=list)
    begun: list[Draw] = field(default_factory=list)

    def draw(self, needed: int, *, begins: bool) -> list[str]:
        later = (self.steps - self.step) * self.batch
        draw = self.policy.decide(needed, needed + later, self.epoch, begins)
        self.begun.append(draw)
        first = self.policy.drawn
        self.policy.drew(draw.fresh)
        return [*map(str, range(first, first + draw.fresh)), *draw.again]

    def one_step(self) -> None:
        self.step += 1
        order = self.finish(self.draw(self.batch, begins=True))
        taken: list[str] = []
        while len(taken) < self.batch:
            if not order:
                order = self.finish(self.draw(self.batch - len(taken), begins=False))
            name = order.pop(0)
            if name in self.failing:
                self.failing.remove(name)
                self.dropped.append(name)
            else:
                taken.append(name)
        self.trained.append(taken)
        self.policy.defer(order)

    def all_steps(self) -> Run:
        while self.step < self.steps:
            self.one_step()
        return self


def at_random(seed: int) -> Callable[[list[str]], list[str]]:
    generator = random.Random(seed)
    return lambda names: generator.sample(names, len(names))


def longest_last(lengths: Sequence[int]) -> Callable[[list[str]], list[str]]:
    return lambda names: sorted(names, key=lambda name: (lengths[int(name) % len(lengths)], int(name)))


def all_trained(run: Run) -> Counter[str]:
    return Counter(name for step in run.trained for name in step)


sizes: dict[str, Any] = {"batch": st.integers(1, 6), "extra": st.integers(1, 6), "seed": st.integers(0, 99)}


@given(**sizes, per_epoch=st.integers(1, 8), epochs=st.integers(1, 4))
@settings(max_examples=400, deadline=None)
def test_every_prompt_is_trained_once_in_each_epoch(
    batch: int, extra: int, seed: int, per_epoch: int, epochs: int
) -> None:
    epoch = batch * per_epoch
    run = Run(TailBatching(extra), batch, epoch, per_epoch * epochs, at_random(seed)).all_steps()
    for number in range(epochs):
        steps = run.trained[number * per_epoch : (number + 1) * per_epoch]
        expected = {str(name) for name in range(number * epoch, (number + 1) * epoch)}
        assert Counter(name for step in steps for name in step) == Counter(expected)
    assert run.policy.deferred == []


@given(**sizes, epoch=st.integers(1, 40), steps=st.integers(1, 30))
@settings(max_examples=400, deadline=None)
def test_a_run_that_ends_anywhere_has_trained_the_first_prompts_of_the_data(
    batch: int, extra: int, seed: int, epoch: int, steps: int
) -> None:
    """As it would without tail batching: nothing is left deferred, and nothing was drawn that is not trained."""
    run = Run(TailBatching(extra), batch, epoch, steps, at_random(seed)).all_steps()
    assert all_trained(run) == Counter(map(str, range(batch * steps)))
    assert run.policy.deferred == [] and run.policy.drawn == batch * steps


@given(**sizes, steps=st.integers(1, 20), failing=st.sets(st.integers(0, 60)))
@settings(max_examples=300, deadline=None)
def test_groups_that_fail_are_replaced_and_nothing_else_is_lost(
    batch: int, extra: int, seed: int, steps: int, failing: set[int]
) -> None:
    run = Run(TailBatching(extra), batch, 25, steps, at_random(seed), set(map(str, failing))).all_steps()
    trained = all_trained(run)
    assert trained.total() == batch * steps and max(trained.values()) == 1
    drawn = set(map(str, range(run.policy.drawn)))
    assert drawn == trained.keys() | set(run.dropped) | set(run.policy.deferred)
    assert len(run.policy.deferred) == 0, "a prompt that failed makes room for one more, which is not deferred"


@given(**sizes, steps=st.integers(1, 20), stops=st.integers(0, 20), epoch=st.integers(2, 30))
@settings(max_examples=300, deadline=None)
def test_a_resumed_run_equals_one_that_never_stopped(
    batch: int, extra: int, seed: int, steps: int, stops: int, epoch: int
) -> None:
    lengths = random.Random(seed).sample(range(1000), 100)
    whole = Run(TailBatching(extra), batch, epoch, steps, longest_last(lengths)).all_steps()
    first = Run(TailBatching(extra), batch, epoch, steps, longest_last(lengths))
    while first.step < min(stops, steps):
        first.one_step()
    continued = TailBatching(extra)
    continued.load_state_dict(first.policy.state_dict())
    resumed = Run(continued, batch, epoch, steps, longest_last(lengths), step=first.step).all_steps()
    assert first.trained + resumed.trained == whole.trained
    assert continued.state_dict() == whole.policy.state_dict() and continued.metrics() == whole.policy.metrics()


def test_long_prompts_are_trained_together() -> None:
    """One prompt in four is long: short steps have none, a tail step has only deferred ones, and waits for them all."""
    run = Run(TailBatching(2), 4, 64, 8, longest_last([1, 1, 1, 100])).all_steps()
    assert [sum(int(name) % 4 == 3 for name in step) for step in run.trained] == [0, 0, 3, 0, 0, 3, 0, 2]
    assert [draw.fresh for draw in run.begun] == [6, 6, 0, 6, 6, 0, 6, 2], "no extra prompts beside deferred ones"
    assert [len(draw.again) for draw in run.begun] == [0, 0, 4, 0, 0, 4, 0, 2]
    assert run.policy.metrics() == {
        "seamless/tail/deferred": 0.0,
        "seamless/tail/begun_again": 10.0,
        "seamless/tail/steps": 2.0,
    }


def test_dropping_instead_would_train_long_prompts_less_often() -> None:
    """What tail batching is for: the same run without the deferred prompts never trains a long one."""
    run = Run(TailBatching(2), 4, 64, 8, longest_last([1, 1, 1, 100]))
    for _ in range(8):
        run.one_step()
        run.policy.deferred.clear()
    assert sum(int(name) % 4 == 3 for step in run.trained for name in step) < 8


def test_without_extra_prompts_deferred_ones_of_an_earlier_run_begin_first() -> None:
    policy = TailBatching()
    policy.load_state_dict({"deferred": ["a", "b", "c"], "drawn": 11, "begun_again": 0, "tail_steps": 0})
    assert policy.decide(2, 20, 16) == Draw(0, ("a", "b"))
    assert policy.decide(2, 18, 16) == Draw(1, ("c",))
    assert policy.decide(2, 16, 16) == Draw(2)


def test_a_group_that_failed_in_a_short_step_is_replaced_by_a_fresh_prompt() -> None:
    policy = TailBatching(1)
    policy.drew(5)
    policy.defer(["long"])
    assert policy.decide(1, 9, 16, begins=False) == Draw(1), "a deferred one would be its tail"
    assert policy.decide(1, 1, 16, begins=False) == Draw(0, ("long",)), "the run ends with this step"


def test_an_epoch_s_last_prompts_are_trained_before_the_next_epoch_s() -> None:
    """Also where dropped groups left fewer of them than a step needs."""
    policy = TailBatching(1)
    policy.drew(16)
    policy.defer(["last"])
    assert policy.decide(2, 20, 16) == Draw(1, ("last",))
    policy.drew(1)
    assert policy.decide(2, 18, 16) == Draw(3)


def test_a_resumed_run_begins_what_has_data_and_no_state() -> None:
    policy = TailBatching(1)
    policy.defer(["a", "b"])
    policy.keep(["c", "b"])
    assert policy.deferred == ["b", "c"]


def test_extra_prompts_are_a_share_of_the_batch_at_least_one() -> None:
    assert [extra_prompts(share, 16) for share in (None, 0.01, 0.125, 0.2, 1.0)] == [0, 1, 2, 4, 16]
    assert extra_prompts(0.1, 30) == 3
