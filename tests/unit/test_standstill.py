"""What ends a run that stands still, and what keeps one alive that only waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest

from seamless_verl.errors import StandstillError
from seamless_verl.trainer.standstill import Standstill

LIMIT_S = 0.2


def standstill(moved: Iterator[float]) -> Standstill:
    return Standstill(LIMIT_S, lambda: next(moved), dict)


@pytest.mark.parametrize("counts", [[0, 3, 7, 12], [9, 2, 5, 11]], ids=["more", "again from nothing"])
def test_tokens_that_come_are_progress(counts: list[float]) -> None:
    watched = standstill(iter(counts))
    assert [watched.outside() for _ in counts] == [True] * len(counts)


def test_the_same_count_twice_is_none_and_so_is_no_answer() -> None:
    watched = standstill(iter([5.0, 5.0]))
    assert [watched.outside(), watched.outside(), watched.outside()] == [True, False, False]


def test_a_training_that_is_stuck_ends_with_the_stage_it_was_at() -> None:
    released = threading.Event()
    watched = standstill(iter([5.0] * 1000))

    def training() -> None:
        watched.reached("waiting for groups, step 3")
        released.wait()

    with pytest.raises(StandstillError, match="waiting for groups, step 3"):
        watched.train(training)
    released.set()


def test_a_training_that_waits_while_tokens_come_is_left_alone() -> None:
    standstill(float(i) for i in count()).train(lambda: time.sleep(4 * LIMIT_S))  # it does nothing for so long
