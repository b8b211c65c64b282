"""A step's report: in its order, beside the next step, one at a time; without one everything is done at once."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace

import pytest

from seamless_verl.trainer.step_report import ReportedQueue, StepReport

SOON_S = 10.0
NOT_LOGGED = "The metrics of the last whole step were not logged"


def test_the_pieces_are_done_in_their_order_in_another_thread_while_the_caller_goes_on() -> None:
    report, done, may_go_on = StepReport(), list[tuple[str, str]](), threading.Event()

    def piece(name: str) -> None:
        assert may_go_on.wait(SOON_S)
        done.append((name, threading.current_thread().name))

    before = set(threading.enumerate())
    report.open(lambda: piece("metrics"))
    report.add(lambda: piece("clear"))
    assert done == []
    report.end(lambda: piece("log"))
    assert set(threading.enumerate()) <= before, "what the trainer does before it waits has the interpreter for itself"
    report.start()
    report.start()  # it waits again
    assert done == []  # and this thread is here
    may_go_on.set()
    report.finish()
    assert [name for name, _ in done] == ["metrics", "clear", "log"]
    assert {thread for _, thread in done} == {"report of a step"}


def test_without_an_open_report_each_piece_is_done_at_once() -> None:
    report, done = StepReport(), list[str]()
    report.add(lambda: done.append("clear"))
    report.end(lambda: done.append(threading.current_thread().name))
    assert done == ["clear", threading.main_thread().name]
    report.finish()


def test_a_report_is_closed_when_it_is_complete_so_that_what_follows_is_done_at_once() -> None:
    report, done, may_go_on = StepReport(), list[str](), threading.Event()
    report.open(lambda: may_go_on.wait(SOON_S))
    report.end(lambda: done.append("log"))
    report.add(lambda: done.append("clear"))
    assert done == ["clear"]
    may_go_on.set()
    report.finish()
    assert done == ["clear", "log"]


def test_the_next_report_waits_for_the_last() -> None:
    report, done, may_go_on = StepReport(), list[str](), threading.Event()
    report.open(lambda: may_go_on.wait(SOON_S))
    report.end(lambda: done.append("log 1"))
    threading.Timer(0.05, may_go_on.set).start()
    report.open(lambda: done.append("metrics 2"))
    assert done == ["log 1"]
    report.end(lambda: done.append("log 2"))
    report.finish()
    assert done == ["log 1", "metrics 2", "log 2"]


def test_what_ends_a_report_ends_the_step_that_waits_for_it_and_nothing_after_it_is_logged() -> None:
    report, done = StepReport(), list[str]()
    report.open(lambda: 1 / 0)
    report.end(lambda: done.append("log"))
    with pytest.raises(ZeroDivisionError):
        report.finish()
    report.finish()  # said once
    assert done == []


def test_where_training_has_failed_a_report_has_its_time_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    report, done, never = StepReport(), list[str](), threading.Event()
    report.finish_within(0.0)
    report.open(lambda: None)
    report.end(lambda: done.append("log"))
    report.finish_within(SOON_S)
    assert done == ["log"] and not caplog.records
    hanging = StepReport()
    hanging.open(lambda: never.wait(SOON_S))
    hanging.end(lambda: None)
    with caplog.at_level(logging.ERROR):
        hanging.finish_within(0.01)
    never.set()
    assert [record.message for record in caplog.records] == [f"{NOT_LOGGED}: they took more than 0.01 s."]


def test_why_a_last_report_is_not_there_is_said(caplog: pytest.LogCaptureFixture) -> None:
    failed, cut = StepReport(), StepReport()
    failed.open(lambda: 1 / 0)
    failed.end(lambda: None)
    failed.finish_within(SOON_S)
    cut.open(lambda: None)
    cut.finish_within(SOON_S)
    assert [record.message for record in caplog.records] == [
        f"{NOT_LOGGED}.",
        f"{NOT_LOGGED}: it ended between two pieces of them.",
    ]
    assert caplog.records[0].exc_info is not None and caplog.records[0].exc_info[0] is ZeroDivisionError


def test_a_failure_is_raised_to_whoever_watches_before_the_next_step_ends() -> None:
    report, may_fail = StepReport(), threading.Event()

    def fail() -> None:
        assert may_fail.wait(SOON_S)
        raise OSError("no space left")

    report.raise_failed()
    report.open(fail)
    report.end(lambda: None)
    report.start()
    report.raise_failed()  # it runs
    may_fail.set()
    deadline = time.monotonic() + SOON_S
    with pytest.raises(OSError, match="no space"):
        while time.monotonic() < deadline:
            report.raise_failed()
            time.sleep(0.001)  # a watcher looks again and again
    with pytest.raises(OSError, match="no space"):
        report.finish()


def test_what_another_thread_clears_is_cleared_at_once() -> None:
    report, done = StepReport(), list[str]()
    report.open(lambda: done.append("metrics"))
    other = threading.Thread(target=lambda: report.add(lambda: done.append("of another")))
    other.start()
    other.join(SOON_S)
    assert done == ["of another"]
    report.end(lambda: None)
    report.finish()
    assert done == ["of another", "metrics"]


def test_rows_of_a_step_that_is_reported_are_cleared_by_its_report() -> None:
    cleared = list[tuple[list[str], str]]()
    module = SimpleNamespace(
        kv_list=lambda: "rows", kv_clear=lambda *, keys, partition_id: cleared.append((keys, partition_id))
    )
    report = StepReport()
    queue = ReportedQueue(module, report)
    assert queue.kv_list() == "rows"
    queue.kv_clear(keys=["a"], partition_id="val")
    assert cleared == [(["a"], "val")]
    report.open(lambda: None)
    queue.kv_clear(keys=["b"], partition_id="train")
    assert len(cleared) == 1
    report.end(lambda: None)
    report.finish()
    assert cleared[1:] == [(["b"], "train")]
