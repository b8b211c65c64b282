"""What a process notes, and how other hosts' clocks are put on ours."""

from __future__ import annotations

import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ledger import Clock, activity, span

from seamless_verl.resources.ledger import Activity, ActivityReport, ClockOffset, DeviceUse
from seamless_verl.resources.ledger.activity import DRIFT


def test_a_block_is_a_span() -> None:
    clock = Clock(1)
    notes = activity(clock)
    with notes.doing("train"):
        clock.now = 4
    clock.now = 5
    assert notes.take() == ActivityReport("s", 5, (span("train", 1, 4),))
    assert notes.take() == ActivityReport("s", 5)


def test_a_block_that_fails_ends_too() -> None:
    clock = Clock()
    notes = activity(clock)
    with pytest.raises(RuntimeError, match="out of memory"), notes.doing(DeviceUse.TRAIN):
        clock.now = 2
        raise RuntimeError("out of memory")
    assert notes.take().spans == (span("train", 0, 2),)


def test_a_count_is_active_while_it_is_above_zero() -> None:
    clock = Clock()
    notes = activity(clock)
    for now, do in enumerate([notes.begin, notes.begin, notes.end, notes.end, notes.begin]):
        clock.now = now
        do("rollout")
    clock.now = 9
    assert notes.take().spans == (span("rollout", 0, 3), span("rollout", 4, 9, open=True))


def test_takes_do_not_overlap_and_leave_no_gap() -> None:
    clock = Clock()
    notes = activity(clock)
    notes.begin("rollout")
    spans = []
    for now in (2, 5, 7):
        clock.now = now
        spans += notes.take().spans
    clock.now = 8
    notes.end("rollout")
    spans += notes.take().spans
    assert [(s.start, s.end, s.open) for s in spans] == [(0, 2, True), (2, 5, True), (5, 7, True), (7, 8, False)]


def test_it_speaks_of_all_its_devices_or_of_some() -> None:
    clock = Clock()
    notes = activity(clock, "d0", "d1")
    with notes.doing("sync"), notes.doing("switch", ["d1"]):
        clock.now = 1
    assert set(notes.take().spans) == {span("sync", 0, 1, "d0"), span("sync", 0, 1, "d1"), span("switch", 0, 1, "d1")}


def test_what_is_wrong_is_refused_and_changes_nothing() -> None:
    notes = activity(Clock(), "d0", "d1")
    notes.begin("rollout", ["d0"])
    with pytest.raises(ValueError, match="rollout of 'd1' ends, but it had not begun"):
        notes.end("rollout")
    with pytest.raises(ValueError, match="kind='idle' is what remains"):
        notes.begin("idle")
    with pytest.raises(ValueError, match="devices=\\('d7',\\) are not all among its own"):
        notes.begin("train", ["d7"])
    with pytest.raises(ValueError, match="'trian'"):
        notes.begin("trian")
    notes.end("rollout", ["d0"])
    with pytest.raises(ValueError, match="give a device"):
        Activity("s", [])


def test_nobody_takes_and_memory_stays_bounded() -> None:
    clock = Clock()
    notes = activity(clock, limit=10)
    for now in range(100):
        clock.now = now
        with notes.doing("rollout"):
            clock.now = now + 0.5
    taken = notes.take()
    assert len(taken.spans) <= 10
    assert sum(s.end - s.start for s in taken.spans) + taken.dropped[DeviceUse.ROLLOUT] == 50
    assert notes.take().dropped == {}


def test_many_threads_write_and_any_of_them_takes() -> None:
    """All takes together are spans one after the other; the clock gives way, so that a race would be met."""

    def clock() -> float:
        now = time.monotonic()
        time.sleep(0)
        return now

    notes = Activity("s", ["d0"], clock=clock)

    def work(seed: int) -> list[ActivityReport]:
        pick, taken = random.Random(seed), []
        for _ in range(50):
            with notes.doing("rollout"):
                if pick.random() < 0.2:
                    taken.append(notes.take())
        return taken

    with ThreadPoolExecutor(4) as pool:
        taken = [batch for batches in pool.map(work, range(4)) for batch in batches]
    last = notes.take()
    assert not any(s.open for s in last.spans)
    spans = sorted(s for batch in [*taken, last] for s in batch.spans)
    assert len(spans) > 20 and all(s.start <= s.end for s in spans)
    assert all(left.end <= right.start for left, right in pairwise(spans))


def test_what_is_taken_travels_between_processes() -> None:
    clock = Clock()
    notes = activity(clock)
    notes.begin("train")
    clock.now = 2
    taken = notes.take()
    assert pickle.loads(pickle.dumps(taken)) == taken


@given(
    offset=st.floats(-1e6, 1e6),
    there=st.floats(0, 1),
    back=st.floats(0, 1),
    sent=st.floats(0, 1e5),
)
def test_the_error_bound_of_a_round_trip_holds(offset: float, there: float, back: float, sent: float) -> None:
    found = ClockOffset.of_round_trip(sent, sent + there + offset, sent + there + back)
    assert abs(found.offset - offset) <= found.error + 1e-9
    assert found.error <= (there + back) / 2 + 1e-9


def test_the_quickest_of_several_trips_is_taken() -> None:
    times = iter([0, 10, 20, 22, 30, 36])
    clock = Clock()

    def tick() -> float:
        clock.now = next(times)
        return clock.now

    found = ClockOffset.measure(lambda: clock.now + 1000, trips=3, clock=tick)
    assert found == ClockOffset(999, 1, 22)
    assert found.here(1021) == 22


def test_a_bound_grows_with_age_so_that_a_newer_trip_is_better_in_the_end() -> None:
    tight, loose = ClockOffset(5, 0.001, 0), ClockOffset(5.002, 0.003, 1000)
    assert loose.better(tight, 1000) is loose and tight.better(loose, 1000) is loose
    assert tight.better(ClockOffset(5, 0.003, 10), 10) is tight
    assert tight.error_at(1000) == pytest.approx(0.001 + 1000 * DRIFT)


def test_impossible_trips_are_refused() -> None:
    with pytest.raises(ValueError, match=r"received=1\.0 lies before sent=2\.0"):
        ClockOffset.of_round_trip(2.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="trips=0"):
        ClockOffset.measure(lambda: 0.0, trips=0)
