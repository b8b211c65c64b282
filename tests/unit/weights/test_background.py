"""A copy beside its worker: who waits for it, for how long, and that every one ends."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from seamless_verl.weights.background import BackgroundStaging, StagingEnd

LIMIT_S = 30
REPORT: Any = "the place of the copy"


class Copy:
    """A copy that ends when it is let, or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.go, self.ended = error, threading.Event(), False

    def __call__(self) -> Any:
        assert self.go.wait(LIMIT_S)
        self.ended = True
        if self.error is not None:
            raise self.error
        return REPORT


def holding(staging: BackgroundStaging, copy: Copy) -> tuple[threading.Thread, list[bool]]:
    """A thread that holds, and whether the copy had ended when it went on; returns when it waits."""
    went_on = list[bool]()

    def hold() -> None:
        staging.wait()
        went_on.append(copy.ended)

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    return thread, went_on


def test_what_would_change_the_weights_waits_and_the_time_is_reported() -> None:
    staging, copy = BackgroundStaging(), Copy()
    staging.wait()  # nothing is copied yet
    assert staging.result() == StagingEnd(None, 0.0)
    staging.start(copy)
    thread, went_on = holding(staging, copy)
    copy.go.set()
    thread.join(LIMIT_S)
    end = staging.result()
    assert went_on == [True] and end.report == REPORT and 0.05 <= end.held_s < LIMIT_S


def test_nothing_is_held_after_the_end_and_each_copy_has_its_own_time() -> None:
    staging, first, second = BackgroundStaging(), Copy(), Copy()
    staging.start(first)
    thread, _ = holding(staging, first)
    first.go.set()
    thread.join(LIMIT_S)
    second.go.set()
    staging.start(second)
    assert staging.result() == StagingEnd(REPORT, 0.0)
    staging.wait()
    assert staging.result() == StagingEnd(REPORT, 0.0)


def test_a_copy_that_fails_holds_nothing_back_and_its_error_is_raised_where_it_is_asked_for() -> None:
    staging, copy = BackgroundStaging(), Copy(OSError("no space left"))
    staging.start(copy)
    thread, went_on = holding(staging, copy)
    copy.go.set()
    thread.join(LIMIT_S)
    assert went_on == [True]
    for _ in range(2):
        with pytest.raises(OSError, match="no space left"):
            staging.result()


def test_a_second_copy_beside_an_open_one_is_refused() -> None:
    staging, copy = BackgroundStaging(), Copy()
    staging.start(copy)
    with pytest.raises(AssertionError, match="while another one still is"):
        staging.start(Copy())
    copy.go.set()
    assert staging.result().report == REPORT
