"""What a process records and reports, and how other hosts' clocks are converted to ours."""

from __future__ import annotations

import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ledger import Clock, make_activity, span

from seamless_verl.resources.ledger.activity import DRIFT, Activity, ActivityReport, ClockOffset, DeviceUse


def test_a_block_is_a_span() -> None:
    clock = Clock(1)
    activity = make_activity(clock)
    with activity.doing("train"):
        clock.now = 4
    clock.now = 5
    assert activity.take() == ActivityReport("s", 5, (span("train", 1, 4),))
    assert activity.take() == ActivityReport("s", 5)


def test_a_block_that_fails_ends_too() -> None:
    clock = Clock()
    activity = make_activity(clock)
    with pytest.raises(RuntimeError, match="out of memory"), activity.doing(DeviceUse.TRAIN):
        clock.now = 2
        raise RuntimeError("out of memory")
    assert activity.take().spans == (span("train", 0, 2),)


def test_a_count_is_active_while_it_is_above_zero() -> None:
    clock = Clock()
    activity = make_activity(clock)
    for now, do in enumerate([activity.begin, activity.begin, activity.end, activity.end, activity.begin]):
        clock.now = now
        do("rollout")
    clock.now = 9
    assert activity.take().spans == (span("rollout", 0, 3), span("rollout", 4, 9, open=True))


def test_reports_do_not_overlap_and_leave_no_gap() -> None:
    clock = Clock()
    activity = make_activity(clock)
    activity.begin("rollout")
    spans = []
    for now in (2, 5, 7):
        clock.now = now
        spans += activity.take().spans
    clock.now = 8
    activity.end("rollout")
    spans += activity.take().spans
    assert [(s.start, s.end, s.open) for s in spans] == [(0, 2, True), (2, 5, True), (5, 7, True), (7, 8, False)]


def test_it_applies_to_all_its_devices_or_to_some() -> None:
    clock = Clock()
    activity = make_activity(clock, "d0", "d1")
    with activity.doing("sync"), activity.doing("switch", ["d1"]):
        clock.now = 1
    assert set(activity.take().spans) == {
        span("sync", 0, 1, "d0"),
        span("sync", 0, 1, "d1"),
        span("switch", 0, 1, "d1"),
    }


def test_wrong_use_is_refused_and_changes_nothing() -> None:
    activity = make_activity(Clock(), "d0", "d1")
    activity.begin("rollout", ["d0"])
    for wrong in (
        lambda: activity.end("rollout"),
        lambda: activity.begin("idle"),
        lambda: activity.begin("train", ["d7"]),
        lambda: Activity("s", []),
    ):
        with pytest.raises(AssertionError):
            wrong()
    activity.end("rollout", ["d0"])


def test_memory_stays_bounded_when_no_report_is_taken() -> None:
    clock = Clock()
    activity = make_activity(clock, limit=10)
    for now in range(100):
        clock.now = now
        with activity.doing("rollout"):
            clock.now = now + 0.5
    report = activity.take()
    assert len(report.spans) <= 10
    assert sum(s.end - s.start for s in report.spans) + report.dropped[DeviceUse.ROLLOUT] == 50
    assert activity.take().dropped == {}


def test_many_threads_record_and_any_of_them_takes_the_report() -> None:
    """All reports together are spans one after the other; the clock yields, so that a race would show."""

    def clock() -> float:
        now = time.monotonic()
        time.sleep(0)
        return now

    activity = Activity("s", ["d0"], clock=clock)

    def work(seed: int) -> list[ActivityReport]:
        pick, reports = random.Random(seed), []
        for _ in range(50):
            with activity.doing("rollout"):
                if pick.random() < 0.2:
                    reports.append(activity.take())
        return reports

    with ThreadPoolExecutor(4) as pool:
        reports = [report for of_thread in pool.map(work, range(4)) for report in of_thread]
    last = activity.take()
    assert not any(s.open for s in last.spans)
    spans = sorted(s for report in [*reports, last] for s in report.spans)
    assert len(spans) > 20 and all(s.start <= s.end for s in spans)
    assert all(left.end <= right.start for left, right in pairwise(spans))


def test_a_report_can_be_pickled() -> None:
    clock = Clock()
    activity = make_activity(clock)
    activity.begin("train")
    clock.now = 2
    report = activity.take()
    assert pickle.loads(pickle.dumps(report)) == report


@given(
    offset=st.floats(-1e6, 1e6),
    forth=st.floats(0, 1),
    back=st.floats(0, 1),
    sent=st.floats(0, 1e5),
)
def test_the_error_bound_of_a_round_trip_holds(offset: float, forth: float, back: float, sent: float) -> None:
    found = ClockOffset.of_round_trip(sent, sent + forth + offset, sent + forth + back)
    assert abs(found.offset - offset) <= found.error + 1e-9
    assert found.error <= (forth + back) / 2 + 1e-9


def test_a_bound_grows_with_age_so_that_a_newer_trip_is_better_in_the_end() -> None:
    tight, loose = ClockOffset(5, 0.001, 0), ClockOffset(5.002, 0.003, 1000)
    assert loose.better(tight, 1000) is loose and tight.better(loose, 1000) is loose
    assert tight.better(ClockOffset(5, 0.003, 10), 10) is tight
    assert tight.error_at(1000) == pytest.approx(0.001 + 1000 * DRIFT)
