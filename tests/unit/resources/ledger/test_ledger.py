"""Every device-second is one kind's: precedence, lateness, open ends, memory."""

from __future__ import annotations

import pytest
from support.ledger import ledger, seconds, span, took

from seamless_verl.errors import IntegrityError
from seamless_verl.resources.ledger import BUSY, ActivityReport, ClockOffset, DeviceUse
from seamless_verl.resources.ledger.interval_set import IntervalSet, Slice, changes, sweep


def test_idle_is_what_remains() -> None:
    books = ledger()
    books.add(took(span("rollout", 1, 4), span("train", 5, 7)))
    report = books.close(10, "step 1")
    assert seconds(books) == {"rollout": 3, "train": 2, "idle": 5}
    assert (report.start, report.until, report.shares[DeviceUse.IDLE]) == (0, 10, 0.5)
    report.check_integrity()
    books.check_integrity()


@pytest.mark.parametrize("over,under", [(o, u) for i, o in enumerate(BUSY) for u in BUSY[i + 1 :]])
def test_where_two_overlap_the_more_direct_measurement_counts_and_the_other_is_named(
    over: DeviceUse, under: DeviceUse
) -> None:
    books = ledger()
    books.add(took(span(under, 0, 6), source="engine"))
    books.add(took(span(over, 4, 10), source="worker"))
    report = books.close(10)
    assert seconds(books) == {over: 6, under: 4}
    assert {pair: s for pair, s in report.hidden.items() if s} == {(over, under): 2}
    assert report.metrics()[f"seamless/device/overlap/{under}_under_{over}_s"] == 2
    books.check_integrity()


def test_the_precedence_is_train_sync_switch_rollout() -> None:
    assert BUSY == (DeviceUse.TRAIN, DeviceUse.SYNC, DeviceUse.SWITCH, DeviceUse.ROLLOUT)


def test_a_time_reported_twice_counts_once() -> None:
    books = ledger()
    for source in ("a", "b", "b"):
        books.add(took(span("rollout", 2, 5), source=source))
    assert books.close(10).metrics()["seamless/device/overlap_s"] == 0
    assert seconds(books) == {"rollout": 3, "idle": 7}


def test_what_arrives_late_is_taken_off_what_it_was_counted_as() -> None:
    books = ledger()
    first = books.close(10)
    books.add(took(span("rollout", 2, 12), source="engine"))
    books.add(took(span("train", 8, 11), source="worker"))
    second = books.close(20)
    assert first.totals[DeviceUse.IDLE] == 10 and second.totals[DeviceUse.IDLE] == 8
    assert {kind: s for kind, s in second.amended["d0"].items() if s} == {"rollout": 6, "train": 2, "idle": -8}
    assert second.metrics()["seamless/device/amended_s"] == 8
    assert seconds(books) == {"rollout": 7, "train": 3, "idle": 10}


def test_an_open_span_goes_on_until_its_source_is_heard_of_again() -> None:
    books = ledger()
    books.add(took(span("rollout", 1, 3, open=True)))
    assert books.close(10).totals[DeviceUse.ROLLOUT] == 9
    books.add(took(span("rollout", 3, 7), until=10))
    report = books.close(12)
    assert report.amended["d0"][DeviceUse.ROLLOUT] == -3 and report.totals[DeviceUse.ROLLOUT] == 0
    assert seconds(books) == {"rollout": 6, "idle": 6}
    books.check_integrity()


def test_an_older_report_that_comes_later_does_not_open_what_has_ended() -> None:
    books = ledger()
    books.add(took(span("rollout", 3, 7), until=8))
    books.add(took(span("rollout", 1, 3, open=True), until=3))
    books.close(10)
    assert seconds(books) == {"rollout": 6, "idle": 4}


def test_of_a_lost_source_nothing_is_assumed_after_its_last_word() -> None:
    books = ledger()
    books.add(took(span("rollout", 1, 3, open=True)))
    books.close(10)
    books.lost("s")
    books.close(12)
    assert seconds(books) == {"rollout": 2, "idle": 10}
    books.add(took(span("train", 1, 2, open=True)))  # a process in its place may have an earlier clock
    books.close(13)
    assert seconds(books) == {"train": 12, "idle": 1}
    books.check_integrity()


def test_open_ends_of_several_sources_are_each_their_own() -> None:
    books = ledger()
    books.add(took(span("rollout", 1, 3, open=True), source="a"))
    books.add(took(span("rollout", 5, 7, open=True), source="b"))
    books.close(10)
    assert seconds(books) == {"rollout": 9, "idle": 1}
    books.lost("a")
    books.close(20)
    assert seconds(books) == {"rollout": 17, "idle": 3}
    books.check_integrity()


def test_what_lies_ahead_waits_for_its_period() -> None:
    books = ledger()
    books.add(took(span("train", 8, 14)))
    assert [books.close(until).totals[DeviceUse.TRAIN] for until in (10, 12, 20)] == [2, 2, 2]
    books.check_integrity()


def test_time_before_the_start_is_nobodys() -> None:
    books = ledger()
    books.add(took(span("train", -5, 2)))
    assert books.close(4).too_late == 0
    assert seconds(books) == {"train": 2, "idle": 2}


def test_what_is_later_than_the_ledger_keeps_is_named_and_changes_nothing() -> None:
    books = ledger(keep_s=5)
    books.close(10)
    books.add(took(span("train", 2, 8)))
    report = books.close(20)
    assert report.too_late == 3 and report.amended["d0"][DeviceUse.TRAIN] == 3
    assert books.close(30).metrics()["seamless/device/too_late_s"] == 0
    books.check_integrity()


def test_an_open_end_stays_counted_when_its_source_is_silent_for_longer_than_is_kept() -> None:
    books = ledger(keep_s=5)
    books.add(took(span("rollout", 0, 1, open=True)))
    for until in (10, 20, 30):
        books.close(until)
        books.check_integrity()
    books.add(ActivityReport("s", 30))
    report = books.close(30)
    assert report.amended["d0"][DeviceUse.ROLLOUT] == -5
    assert seconds(books) == {"rollout": 25, "idle": 5}
    books.check_integrity()


@pytest.mark.parametrize("settings", [{"keep_s": 20.0}, {"keep_s": 1e9, "most": 40}])
def test_memory_does_not_grow_with_the_run(settings: dict[str, float]) -> None:
    books, held = ledger(**settings), []
    for step in range(200):
        books.add(took(*(span("rollout", 10 * step + n, 10 * step + n + 0.5) for n in range(10))))
        books.close(10 * step + 10)
        held.append(books.held)
    assert max(held) == max(held[:10]) <= 41
    assert seconds(books) == {"rollout": 1000, "idle": 1000}
    books.check_integrity()


def test_devices_have_books_of_their_own() -> None:
    books = ledger(3)
    books.add(took(span("train", 0, 5, "d0"), span("sync", 2, 5, "d2", open=True)))
    report = books.close(10)
    assert seconds(books, "d1") == {"idle": 10}
    assert seconds(books, "d2") == {"sync": 8, "idle": 2}
    assert sum(report.totals.values()) == 30


def test_a_source_on_another_host_is_put_on_our_clock() -> None:
    books = ledger()
    books.add(took(span("train", 1002, 1006), until=1007), ClockOffset(1000, 0.001, 0))
    books.close(10)
    assert seconds(books) == {"train": 4, "idle": 6}


def test_metrics_are_named_for_each_kind_and_device() -> None:
    books = ledger(2)
    assert books.metrics() == {}
    books.add(took(span("train", 0, 5, "d1")))
    books.close(10)
    books.close(20)
    metrics = books.metrics()
    assert {name for name in metrics if name.endswith("_share") and name.count("/") == 2} == {
        f"seamless/device/{kind}_share" for kind in DeviceUse
    }
    assert metrics["seamless/device/idle_share"] == metrics["seamless/device/d1/idle_share"] == 1
    assert metrics["seamless/device/run/train_share"] == 0.125
    assert not [name for name in books.metrics(per_device=False) if "/d1/" in name]
    assert all(isinstance(value, float) for value in metrics.values())


def test_an_empty_period_has_no_shares() -> None:
    report = ledger().close(0)
    report.check_integrity()
    assert set(report.shares.values()) == {0.0}


def test_what_a_source_could_not_keep_is_named() -> None:
    books = ledger()
    books.add(ActivityReport("s", 5, (), {DeviceUse.ROLLOUT: 1.5}))
    assert [books.close(until).dropped for until in (10, 20)] == [1.5, 0]


@pytest.mark.parametrize(
    "spans,named",
    [
        ([span("train", 0, 1), span("train", 0, 1, "d9")], "device='d9'"),
        ([span("train", 0, 1), span("train", 3, 2)], "start=3"),
        ([span("train", 0, 1), span("idle", 1, 2)], "DeviceUse.IDLE"),
        ([span("train", 0, 1), span("train", float("nan"), 2)], "nan"),
    ],
)
def test_an_impossible_report_is_refused_whole(spans: list, named: str) -> None:  # type: ignore[type-arg]
    books = ledger()
    with pytest.raises(ValueError, match=named):
        books.add(took(*spans, until=5))
    books.close(10)
    assert seconds(books) == {"idle": 10}


def test_the_ledger_refuses_what_cannot_be() -> None:
    books = ledger()
    books.close(10)
    with pytest.raises(ValueError, match=r"until=9\.5 lies before 10"):
        books.close(9.5)
    with pytest.raises(ValueError, match="name each device, once"):
        ledger(0)
    with pytest.raises(ValueError, match="keep_s=-1"):
        ledger(keep_s=-1)


@pytest.mark.parametrize("kind", DeviceUse)
def test_books_that_do_not_close_are_found(kind: DeviceUse) -> None:
    books = ledger()
    books.add(took(span("rollout", 0, 40), span("train", 10, 30), span("sync", 50, 60), span("switch", 70, 80)))
    books.close(100)
    book = books._books["d0"]
    book.seconds[kind] += 0.9  # within the tolerance
    books.check_integrity()
    book.seconds[kind] += 0.2
    with pytest.raises(IntegrityError, match=r"device 'd0': wall time against .* 100000 against 101100.*\+1100"):
        books.check_integrity()


def test_a_report_that_was_lost_on_the_way_is_found() -> None:
    """The kinds add up, but not to what was reported: idle took what was rollout's."""
    books = ledger()
    books.add(took(span("rollout", 0, 40)))
    books.close(100)
    book = books._books["d0"]
    book.seconds[DeviceUse.ROLLOUT] -= 2
    book.seconds[DeviceUse.IDLE] += 2
    with pytest.raises(IntegrityError, match=r"reported as rollout .* 40000 against 38000"):
        books.check_integrity()


def test_a_cover_is_a_union() -> None:
    cover = IntervalSet([(5, 6), (1, 2), (8, 9)])
    assert cover.add(1.5, 5) == 3 and list(cover) == [(1, 6), (8, 9)]
    assert cover.add(6, 8) == 2 and list(cover) == [(1, 9)]
    assert cover.add(0, 10) == 2 and cover.add(3, 3) == 0
    assert cover.within(2, 4) == [(2, 4)] and cover.within(10, 12) == []


def test_changes_are_where_two_sweeps_differ() -> None:
    train, rollout = (DeviceUse.TRAIN,), (DeviceUse.ROLLOUT,)
    before = [Slice(0, 2, ()), Slice(2, 4, train), Slice(4, 6, ())]
    after = [Slice(0, 1, rollout), Slice(1, 2, ()), Slice(2, 4, train), Slice(4, 5, train), Slice(5, 6, ())]
    assert changes(before, after) == [
        (0, 1, DeviceUse.IDLE, DeviceUse.ROLLOUT),
        (4, 5, DeviceUse.IDLE, DeviceUse.TRAIN),
    ]
    assert changes([Slice(0, 2, ()), Slice(2, 4, train)], [Slice(0, 2, train), Slice(2, 4, ())]) == [
        (0, 2, DeviceUse.IDLE, DeviceUse.TRAIN),
        (2, 4, DeviceUse.TRAIN, DeviceUse.IDLE),
    ]
    assert changes(before, before) == []


def test_a_sweep_has_no_gap() -> None:
    found = sweep({DeviceUse.TRAIN: [(2, 4)], DeviceUse.ROLLOUT: [(1, 3)]}, 0, 5)
    assert found == [
        Slice(0, 1, ()),
        Slice(1, 2, (DeviceUse.ROLLOUT,)),
        Slice(2, 3, (DeviceUse.TRAIN, DeviceUse.ROLLOUT)),
        Slice(3, 4, (DeviceUse.TRAIN,)),
        Slice(4, 5, ()),
    ]
