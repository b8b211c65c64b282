"""Every device-second is one kind's: precedence, lateness, open ends, memory."""

from __future__ import annotations

import pytest
from support.ledger import activity_report, interval_count, make_ledger, seconds, span

from seamless_verl.errors import IntegrityError
from seamless_verl.resources.ledger.activity import BUSY, ActivityReport, ClockOffset, DeviceUse
from seamless_verl.resources.ledger.device import DeviceLedger, IntervalSet, Slice, compare_sweeps, sweep


def test_idle_is_what_remains() -> None:
    ledger = make_ledger()
    ledger.add(activity_report(span("rollout", 1, 4), span("train", 5, 7)))
    report = ledger.close(10, "step 1")
    assert seconds(ledger) == {"rollout": 3, "train": 2, "idle": 5}
    assert (report.start, report.until, report.shares[DeviceUse.IDLE]) == (0, 10, 0.5)
    report.check_integrity()
    ledger.check_integrity()


@pytest.mark.parametrize("over,under", [(o, u) for i, o in enumerate(BUSY) for u in BUSY[i + 1 :]])
def test_where_two_overlap_the_more_direct_measurement_counts_and_the_other_is_named(
    over: DeviceUse, under: DeviceUse
) -> None:
    ledger = make_ledger()
    ledger.add(activity_report(span(under, 0, 6), source="engine"))
    ledger.add(activity_report(span(over, 4, 10), source="worker"))
    report = ledger.close(10)
    assert seconds(ledger) == {over: 6, under: 4}
    assert {pair: s for pair, s in report.hidden.items() if s} == {(over, under): 2}
    assert report.metrics()[f"seamless/device/overlap/{under}_under_{over}_s"] == 2
    ledger.check_integrity()


def test_the_precedence_is_train_sync_switch_rollout() -> None:
    assert BUSY == (DeviceUse.TRAIN, DeviceUse.SYNC, DeviceUse.SWITCH, DeviceUse.ROLLOUT)


def test_a_time_reported_twice_counts_once() -> None:
    ledger = make_ledger()
    for source in ("a", "b", "b"):
        ledger.add(activity_report(span("rollout", 2, 5), source=source))
    assert ledger.close(10).metrics()["seamless/device/overlap_s"] == 0
    assert seconds(ledger) == {"rollout": 3, "idle": 7}


def test_a_late_report_is_subtracted_from_what_its_time_was_counted_as() -> None:
    ledger = make_ledger()
    first = ledger.close(10)
    ledger.add(activity_report(span("rollout", 2, 12), source="engine"))
    ledger.add(activity_report(span("train", 8, 11), source="worker"))
    second = ledger.close(20)
    assert first.totals[DeviceUse.IDLE] == 10 and second.totals[DeviceUse.IDLE] == 8
    assert {kind: s for kind, s in second.amended["d0"].items() if s} == {"rollout": 6, "train": 2, "idle": -8}
    assert second.metrics()["seamless/device/amended_s"] == 8
    assert seconds(ledger) == {"rollout": 7, "train": 3, "idle": 10}


def test_an_open_span_goes_on_until_its_source_reports_again() -> None:
    ledger = make_ledger()
    ledger.add(activity_report(span("rollout", 1, 3, open=True)))
    assert ledger.close(10).totals[DeviceUse.ROLLOUT] == 9
    ledger.add(activity_report(span("rollout", 3, 7), until=10))
    report = ledger.close(12)
    assert report.amended["d0"][DeviceUse.ROLLOUT] == -3 and report.totals[DeviceUse.ROLLOUT] == 0
    assert seconds(ledger) == {"rollout": 6, "idle": 6}
    ledger.check_integrity()


def test_an_older_report_that_comes_later_does_not_open_what_has_ended() -> None:
    ledger = make_ledger()
    ledger.add(activity_report(span("rollout", 3, 7), until=8))
    ledger.add(activity_report(span("rollout", 1, 3, open=True), until=3))
    ledger.close(10)
    assert seconds(ledger) == {"rollout": 6, "idle": 4}


def test_of_a_source_lost_at_an_unknown_time_nothing_is_assumed_after_its_last_report() -> None:
    ledger = make_ledger()
    ledger.add(activity_report(span("rollout", 1, 3, open=True)))
    ledger.close(10)
    ledger.source_lost("s")
    ledger.close(12)
    assert seconds(ledger) == {"rollout": 2, "idle": 10}
    ledger.add(activity_report(span("train", 1, 2, open=True)))  # a process in its place may have an earlier clock
    ledger.close(13)
    assert seconds(ledger) == {"train": 12, "idle": 1}
    ledger.check_integrity()


def test_a_dead_engine_is_not_counted_as_generating_after_its_last_report() -> None:
    """The period in which it died was closed before its death was known."""
    ledger = make_ledger()
    ledger.add(activity_report(span("rollout", 1, 3, open=True)))
    assert ledger.close(10).totals[DeviceUse.ROLLOUT] == 9
    for source in ("s", "s", "never heard of"):
        ledger.source_lost(source)
    report = ledger.close(20)
    assert report.amended["d0"][DeviceUse.ROLLOUT] == -7 and report.totals[DeviceUse.ROLLOUT] == 0
    assert seconds(ledger) == {"rollout": 2, "idle": 18}
    ledger.check_integrity()


def test_a_living_source_taken_for_lost_is_counted_again_with_its_next_report() -> None:
    ledger = make_ledger()
    ledger.add(activity_report(span("rollout", 0, 4, open=True)))
    ledger.source_lost("s")
    ledger.close(10)
    assert seconds(ledger) == {"rollout": 4, "idle": 6}
    ledger.add(activity_report(span("rollout", 4, 12, open=True)))
    ledger.close(20)
    assert seconds(ledger) == {"rollout": 20}
    ledger.check_integrity()


def test_open_ends_of_several_sources_are_each_their_own() -> None:
    ledger = make_ledger()
    ledger.add(activity_report(span("rollout", 1, 3, open=True), source="a"))
    ledger.add(activity_report(span("rollout", 5, 7, open=True), source="b"))
    ledger.close(10)
    assert seconds(ledger) == {"rollout": 9, "idle": 1}
    ledger.source_lost("a")
    ledger.close(20)
    assert seconds(ledger) == {"rollout": 17, "idle": 3}
    ledger.check_integrity()


def test_time_after_the_close_waits_for_its_period() -> None:
    ledger = make_ledger()
    ledger.add(activity_report(span("train", 8, 14)))
    assert [ledger.close(until).totals[DeviceUse.TRAIN] for until in (10, 12, 20)] == [2, 2, 2]
    ledger.check_integrity()


def test_time_before_the_start_is_not_counted() -> None:
    ledger = make_ledger()
    ledger.add(activity_report(span("train", -5, 2)))
    assert ledger.close(4).too_late == 0
    assert seconds(ledger) == {"train": 2, "idle": 2}


def test_a_report_later_than_the_ledger_keeps_is_named_and_changes_nothing() -> None:
    ledger = make_ledger(keep_s=5)
    ledger.close(10)
    ledger.add(activity_report(span("train", 2, 8)))
    report = ledger.close(20)
    assert report.too_late == 3 and report.amended["d0"][DeviceUse.TRAIN] == 3
    assert ledger.close(30).metrics()["seamless/device/too_late_s"] == 0
    ledger.check_integrity()


def test_an_open_end_stays_counted_when_its_source_is_silent_for_longer_than_is_kept() -> None:
    ledger = make_ledger(keep_s=5)
    ledger.add(activity_report(span("rollout", 0, 1, open=True)))
    for until in (10, 20, 30):
        ledger.close(until)
        ledger.check_integrity()
    ledger.add(ActivityReport("s", 30))
    report = ledger.close(30)
    assert report.amended["d0"][DeviceUse.ROLLOUT] == -5
    assert seconds(ledger) == {"rollout": 25, "idle": 5}
    ledger.check_integrity()


@pytest.mark.parametrize("settings", [{"keep_s": 20.0}, {"keep_s": 1e9, "max_intervals": 40}])
def test_memory_does_not_grow_with_the_run(settings: dict[str, float]) -> None:
    ledger, counts = make_ledger(**settings), []
    for step in range(200):
        ledger.add(activity_report(*(span("rollout", 10 * step + n, 10 * step + n + 0.5) for n in range(10))))
        ledger.close(10 * step + 10)
        counts.append(interval_count(ledger))
    assert max(counts) == max(counts[:10]) <= 41
    assert seconds(ledger) == {"rollout": 1000, "idle": 1000}
    ledger.check_integrity()


def test_each_device_is_counted_on_its_own() -> None:
    ledger = make_ledger(3)
    ledger.add(activity_report(span("train", 0, 5, "d0"), span("sync", 2, 5, "d2", open=True)))
    report = ledger.close(10)
    assert seconds(ledger, "d1") == {"idle": 10}
    assert seconds(ledger, "d2") == {"sync": 8, "idle": 2}
    assert sum(report.totals.values()) == 30


def test_a_report_of_another_host_is_converted_to_our_clock() -> None:
    ledger = make_ledger()
    ledger.add(activity_report(span("train", 1002, 1006), until=1007), ClockOffset(1000, 0.001, 0))
    ledger.close(10)
    assert seconds(ledger) == {"train": 4, "idle": 6}


def test_metrics_are_named_for_each_kind_and_device() -> None:
    ledger = make_ledger(2)
    assert ledger.metrics() == {}
    ledger.add(activity_report(span("train", 0, 5, "d1")))
    ledger.close(10)
    ledger.close(20)
    metrics = ledger.metrics()
    assert {name for name in metrics if name.endswith("_share") and name.count("/") == 2} == {
        f"seamless/device/{kind}_share" for kind in DeviceUse
    }
    assert metrics["seamless/device/idle_share"] == metrics["seamless/device/d1/idle_share"] == 1
    assert metrics["seamless/device/run/train_share"] == 0.125
    assert all(isinstance(value, float) for value in metrics.values())


def test_a_period_whose_kinds_do_not_add_up_is_found_when_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = make_ledger(2)
    ledger.close(10)
    monkeypatch.setattr(DeviceLedger, "close", lambda self, until: [])
    with pytest.raises(IntegrityError, match="devices x wall time"):
        ledger.close(20)


def test_an_empty_period_has_no_shares() -> None:
    report = make_ledger().close(0)
    report.check_integrity()
    assert set(report.shares.values()) == {0.0}


def test_what_a_source_could_not_keep_is_named() -> None:
    ledger = make_ledger()
    ledger.add(ActivityReport("s", 5, (), {DeviceUse.ROLLOUT: 1.5}))
    assert [ledger.close(until).dropped for until in (10, 20)] == [1.5, 0]


@pytest.mark.parametrize("kind", DeviceUse)
def test_seconds_that_do_not_add_up_are_found(kind: DeviceUse) -> None:
    ledger = make_ledger()
    ledger.add(
        activity_report(span("rollout", 0, 40), span("train", 10, 30), span("sync", 50, 60), span("switch", 70, 80))
    )
    ledger.close(100)
    device_ledger = ledger._devices["d0"]
    device_ledger.seconds[kind] += 0.9  # within the tolerance
    ledger.check_integrity()
    device_ledger.seconds[kind] += 0.2
    with pytest.raises(IntegrityError, match=r"device 'd0': wall time against .* 100000 against 101100.*\+1100"):
        ledger.check_integrity()


def test_a_report_that_was_lost_on_the_way_is_found() -> None:
    """The kinds add up, but not to what was reported: idle got what was rollout's."""
    ledger = make_ledger()
    ledger.add(activity_report(span("rollout", 0, 40)))
    ledger.close(100)
    device_ledger = ledger._devices["d0"]
    device_ledger.seconds[DeviceUse.ROLLOUT] -= 2
    device_ledger.seconds[DeviceUse.IDLE] += 2
    with pytest.raises(IntegrityError, match=r"reported as rollout .* 40000 against 38000"):
        ledger.check_integrity()


def test_an_interval_set_is_a_union() -> None:
    intervals = IntervalSet([(5, 6), (1, 2), (8, 9)])
    assert intervals.add(1.5, 5) == 3 and list(intervals) == [(1, 6), (8, 9)]
    assert intervals.add(6, 8) == 2 and list(intervals) == [(1, 9)]
    assert intervals.add(0, 10) == 2 and intervals.add(3, 3) == 0
    assert intervals.within(2, 4) == [(2, 4)] and intervals.within(10, 12) == []


def test_sweeps_are_compared() -> None:
    train, rollout = (DeviceUse.TRAIN,), (DeviceUse.ROLLOUT,)
    before = [Slice(0, 2, ()), Slice(2, 4, train), Slice(4, 6, ())]
    after = [Slice(0, 1, rollout), Slice(1, 2, ()), Slice(2, 4, train), Slice(4, 5, train), Slice(5, 6, ())]
    assert compare_sweeps(before, after) == [
        (0, 1, DeviceUse.IDLE, DeviceUse.ROLLOUT),
        (4, 5, DeviceUse.IDLE, DeviceUse.TRAIN),
    ]
    assert compare_sweeps([Slice(0, 2, ()), Slice(2, 4, train)], [Slice(0, 2, train), Slice(2, 4, ())]) == [
        (0, 2, DeviceUse.IDLE, DeviceUse.TRAIN),
        (2, 4, DeviceUse.TRAIN, DeviceUse.IDLE),
    ]
    assert compare_sweeps(before, before) == []


def test_a_sweep_has_no_gap() -> None:
    found = sweep({DeviceUse.TRAIN: [(2, 4)], DeviceUse.ROLLOUT: [(1, 3)]}, 0, 5)
    assert found == [
        Slice(0, 1, ()),
        Slice(1, 2, (DeviceUse.ROLLOUT,)),
        Slice(2, 3, (DeviceUse.TRAIN, DeviceUse.ROLLOUT)),
        Slice(3, 4, (DeviceUse.TRAIN,)),
        Slice(4, 5, ()),
    ]
