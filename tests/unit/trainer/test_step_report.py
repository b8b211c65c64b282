"""A step's report: in its order, beside the next step, one at a time; without one everything is done at once."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from seamless_verl.trainer.step_report import ReportedQueue, StepReport

SOON_S = 10.0


def test_the_pieces_are_done_in_their_order_in_another_thread_while_the_caller_goes_on() -> None:
    report, done, may_go_on = StepReport(), list[tuple[str, str]](), threading.Event()

    def piece(name: str) -> None:
        assert may_go_on.wait(SOON_S)
        done.append((name, threading.current_thread().name))

    report.open(lambda: piece("metrics"))
    report.add(lambda: piece("clear"))
    assert done == []
    report.begin(lambda: piece("log"))
    assert done == []  # and this thread is here
    may_go_on.set()
    report.finish()
    assert [name for name, _ in done] == ["metrics", "clear", "log"]
    assert {thread for _, thread in done} == {"report of a step"}


def test_without_an_open_report_each_piece_is_done_at_once() -> None:
    report, done = StepReport(), list[str]()
    report.add(lambda: done.append("clear"))
    report.begin(lambda: done.append(threading.current_thread().name))
    assert done == ["clear", threading.main_thread().name]
    report.finish()


def test_a_report_is_closed_when_it_runs_so_that_what_follows_is_done_at_once() -> None:
    report, done, may_go_on = StepReport(), list[str](), threading.Event()
    report.open(lambda: may_go_on.wait(SOON_S))
    report.begin(lambda: done.append("log"))
    report.add(lambda: done.append("clear"))
    assert done == ["clear"]
    may_go_on.set()
    report.finish()
    assert done == ["clear", "log"]


def test_the_next_report_waits_for_the_last() -> None:
    report, done, may_go_on = StepReport(), list[str](), threading.Event()
    report.open(lambda: may_go_on.wait(SOON_S))
    report.begin(lambda: done.append("log 1"))
    threading.Timer(0.05, may_go_on.set).start()
    report.open(lambda: done.append("metrics 2"))
    assert done == ["log 1"]
    report.begin(lambda: done.append("log 2"))
    report.finish()
    assert done == ["log 1", "metrics 2", "log 2"]


def test_what_ends_a_report_ends_the_step_that_waits_for_it_and_nothing_after_it_is_logged() -> None:
    report, done = StepReport(), list[str]()
    report.open(lambda: 1 / 0)
    report.begin(lambda: done.append("log"))
    with pytest.raises(ZeroDivisionError):
        report.finish()
    report.finish()  # said once
    assert done == []


def test_where_training_has_failed_a_report_has_its_time_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    report, done, never = StepReport(), list[str](), threading.Event()
    report.finish_within(0.0)
    report.open(lambda: None)
    report.begin(lambda: done.append("log"))
    report.finish_within(SOON_S)
    assert done == ["log"] and not caplog.records
    hanging = StepReport()
    hanging.open(lambda: never.wait(SOON_S))
    hanging.begin(lambda: None)
    with caplog.at_level(logging.ERROR):
        hanging.finish_within(0.01)
    never.set()
    assert [record.message for record in caplog.records] == ["The metrics of the last whole step were not logged."]


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
    report.begin(lambda: None)
    report.finish()
    assert cleared[1:] == [(["b"], "train")]
