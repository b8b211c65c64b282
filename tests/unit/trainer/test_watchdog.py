"""The watchdog ends a run without progress, and leaves alone a run that only waits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import count, repeat
from typing import Any

import pytest
from support.ledger import Clock

from seamless_verl.errors import NoProgressError, WeightsNotLoadedError
from seamless_verl.trainer.watchdog import Watchdog

LIMIT_S = 0.2


def watchdog(counts: Iterator[float | None], limit_s: float = LIMIT_S) -> Watchdog:
    return Watchdog(limit_s, lambda: next(counts), dict)


def timed(clock: Clock, counts: Iterator[float | None]) -> Watchdog:
    return Watchdog(100.0, lambda: next(counts), dict, clock=clock)


def watching() -> bool:
    return "watchdog" in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("counts", "progress"),
    [
        ([0.0, 3.0, 7.0, 12.0], [True] * 4),
        ([9.0, 2.0, 5.0, 11.0], [True] * 4),
        ([5.0, 5.0, None, 5.0, 6.0], [True, False, False, False, True]),
    ],
    ids=["more", "restarted", "the same twice, and no reply"],
)
def test_new_tokens_are_progress(counts: list[float | None], progress: list[bool]) -> None:
    clock, found = Clock(), list[bool]()
    watched = timed(clock, iter(counts))
    for _ in counts:
        clock.now += 1
        found.append(watched.without_progress_s() == 0)
    assert found == progress


def test_a_stage_entered_in_time_is_progress() -> None:
    clock = Clock(5)
    watched = timed(clock, repeat(5.0))
    for clock.now in (104, 203, 302):
        watched.check()
        watched.enter_stage("a stage")
    clock.now = 401.9
    watched.check()


def test_tokens_are_progress_for_one_limit_from_when_they_were_seen(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watched = timed(clock, iter([5.0, 6.0, 6.0, 6.0, 6.0]))
    watched.enter_stage("waiting for groups, step 3")
    for clock.now in (100, 190, 200, 289):
        watched.check()
    clock.now = 300
    with pytest.raises(
        NoProgressError, match=r"made no progress for 110\.0 s\.\nThe trainer was at: waiting for groups"
    ):
        watched.check()
    (message,) = (record.getMessage() for record in caplog.records if record.levelno == logging.CRITICAL)
    assert "The trainer was at: waiting for groups, step 3." in message and "thread MainThread (" in message


def test_a_data_plane_that_does_not_reply_for_a_while_ends_no_run_whose_calls_generated_until_then() -> None:
    clock = Clock()
    watched = timed(clock, iter([5.0, 6.0, None, None, 2.0]))
    for clock.now in (50, 90, 101, 180, 189):
        watched.check()
    assert watched.last_progress == 189


def test_a_training_that_is_stuck_ends_with_the_stage_it_was_at() -> None:
    released = threading.Event()
    watched = watchdog(repeat(5.0))

    def training() -> None:
        watched.enter_stage("waiting for groups, step 3")
        released.wait()

    with pytest.raises(NoProgressError, match="waiting for groups, step 3"):
        watched.train(training)
    assert not watching()
    released.set()


def test_a_training_that_waits_while_tokens_come_is_left_alone() -> None:
    watchdog(float(i) for i in count()).train(lambda: time.sleep(4 * LIMIT_S))  # it does nothing for so long
    assert not watching()


def test_a_training_that_fails_fails_with_its_own_error() -> None:
    def training() -> None:
        raise OSError("no room for the checkpoint")

    with pytest.raises(OSError, match="no room"):
        watchdog(repeat(5.0), limit_s=1000.0).train(training)
    assert not watching()


def test_an_error_of_a_check_is_logged_and_ends_the_training(caplog: pytest.LogCaptureFixture) -> None:
    released = threading.Event()

    def training() -> None:
        released.wait()

    def actors() -> Mapping[str, Any]:
        raise KeyError("replica-7")

    watched = Watchdog(LIMIT_S, lambda: 5.0, actors)
    with pytest.raises(KeyError, match="replica-7"):
        watched.train(training)
    assert "the watchdog ends the training: 'replica-7'" in caplog.text and not watching()
    released.set()


def test_what_a_further_check_finds_ends_a_training_that_waits_while_tokens_come() -> None:
    released, failing = threading.Event(), threading.Event()

    def check() -> None:
        if failing.is_set():
            raise WeightsNotLoadedError("replica-1", 3, "the host is gone")

    def training() -> None:
        released.wait()

    counts = (float(i) for i in count())
    watched = Watchdog(LIMIT_S, counts.__next__, dict, checks=[lambda: None, check])
    threading.Timer(LIMIT_S, failing.set).start()
    with pytest.raises(WeightsNotLoadedError, match="could not load version 3"):
        watched.train(training)
    assert failing.is_set() and not watching()
    released.set()
