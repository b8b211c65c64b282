"""The trace on disk: read while it is written, when its end is missing, and by any JSON reader."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ledger import activity_report, make_ledger, span, stretches

from seamless_verl.resources.ledger.activity import BUSY, DeviceUse
from seamless_verl.resources.ledger.ledger import Ledger
from seamless_verl.resources.ledger.trace import Trace
from seamless_verl.tools.view.timeline import COLUMN_OF, read_events, read_timeline


def traced(folder: Path, devices: int = 2, **settings: Any) -> tuple[Ledger, Trace]:
    trace = Trace(folder / "trace.json", [f"d{n}" for n in range(devices)], 0.0)
    return make_ledger(devices, trace=trace, **settings), trace


def test_each_device_has_a_lane_and_each_step_a_stretch(tmp_path: Path) -> None:
    ledger, trace = traced(tmp_path)
    ledger.add(activity_report(span("train", 1, 3, "d1"), span("rollout", 0, 2, "d1"), span("sync", 4, 5, "d0")))
    ledger.close(10, "step 1")
    assert stretches(trace.path, 1) == [(0, "sync", 4, 5), (1, "rollout", 0, 1), (1, "train", 1, 3)]
    assert stretches(trace.path, 3) == [(0, "step 1", 0, 10)]
    names = [e["args"]["name"] for e in read_events(trace.path) if e["name"] == "thread_name" and e["pid"] == 1]
    assert names == ["d0", "d1"]


def test_it_is_the_format_also_to_other_readers(tmp_path: Path) -> None:
    """It is JSON but for the last comma and the bracket, which the format allows."""
    ledger, trace = traced(tmp_path)
    ledger.add(activity_report(span("train", 0.25, 3.000001)))
    ledger.close(5)
    events = json.loads(trace.path.read_text().rstrip().rstrip(",") + "]")
    assert events == list(read_events(trace.path))
    for event in events:
        assert {"ph", "pid", "name"} <= event.keys() and event["ph"] in "MXC"
        assert event["ph"] == "M" or isinstance(event["ts"], int | float)
    (train,) = [event for event in events if event["name"] == "train"]
    assert (train["ts"], train["dur"]) == (250000.0, 2750001.0)
    (counter,) = [event for event in events if event["ph"] == "C"]
    assert (counter["name"], counter["ts"]) == ("idle share", 0.0)
    assert counter["args"]["idle"] == pytest.approx(0.725, abs=1e-6)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path, cut: int) -> None:
    ledger, trace = traced(tmp_path)
    ledger.close(1, "step 1")
    whole = list(read_events(trace.path))
    os.truncate(trace.path, trace.path.stat().st_size - cut)
    assert list(read_events(trace.path)) == whole[:-1]


def test_a_line_that_is_no_event_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('[\n{"ph":"M","pid":1,"name":"x","args":{}},\nnonsense\n')
    with pytest.raises(ValueError, match=r"other\.json:3 is not an event"):
        list(read_events(path))


def test_another_runs_trace_is_not_overwritten(tmp_path: Path) -> None:
    traced(tmp_path)
    with pytest.raises(FileExistsError):
        traced(tmp_path)


def test_a_trace_without_a_step_says_so(tmp_path: Path) -> None:
    _, trace = traced(tmp_path)
    with pytest.raises(ValueError, match="ended before its first step"):
        read_timeline(trace.path)
    with pytest.raises(ValueError, match="columns=0"):
        read_timeline(trace.path, columns=0)


def test_a_window_is_the_end_of_the_run(tmp_path: Path) -> None:
    ledger, trace = traced(tmp_path, 1)
    ledger.add(activity_report(span("train", 0, 50), span("rollout", 92, 94)))
    for until in (50, 95, 100):
        ledger.close(until, f"until {until}")
    timeline = read_timeline(trace.path, columns=5, last_s=10)
    assert (timeline.start, timeline.until) == (90, 100)
    assert timeline.steps == (("until 95", 95), ("until 100", 100))
    assert timeline.grid[0, :, COLUMN_OF[DeviceUse.ROLLOUT]].tolist() == pytest.approx([0, 2, 0, 0, 0])
    assert timeline.shares[0, :, COLUMN_OF[DeviceUse.IDLE]].mean() == pytest.approx(0.8)


stretch = st.tuples(st.sampled_from(BUSY), st.integers(0, 30), st.integers(1, 9), st.sampled_from(["d0", "d1"]))


@settings(max_examples=40, deadline=None)
@given(
    batches=st.lists(st.lists(st.tuples(stretch, st.booleans()), max_size=4), min_size=1, max_size=6),
    columns=st.integers(1, 50),
)
def test_what_is_read_back_is_what_the_books_say(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[Any]], columns: int
) -> None:
    """Late and open ones too: each batch is heard at a close that lies before, in or after it."""
    ledger, trace = traced(tmp_path_factory.mktemp("trace"))
    for number, batch in enumerate(batches):
        spans = [span(kind, at, at + length, on, open=goes_on) for (kind, at, length, on), goes_on in batch]
        ledger.add(activity_report(*spans, until=40 + number, source=f"s{number % 2}"))
        ledger.close(40 * (number + 1) / len(batches))
    timeline = read_timeline(trace.path, columns=columns)
    for lane, kinds in enumerate(ledger.seconds.values()):
        assert timeline.grid[lane].sum(axis=0).tolist() == pytest.approx(list(kinds.values()), abs=1e-5)
    assert np.allclose(timeline.grid.sum(axis=2), 40 / columns, atol=1e-5)
