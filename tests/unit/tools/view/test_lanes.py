"""Lanes have what the ledger counted, and many devices are shown as groups of neighbours."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ledger import activity_report, make_ledger, span

from seamless_verl.resources.ledger.trace import END, Trace
from seamless_verl.tools.view.timeline import MAX_LANES, WHOLE, read_lanes
from seamless_verl.tools.view.trajectory import Answer


def traced(folder: Path, devices: int) -> Path:
    """Ten seconds: the even devices train in the first five, the odd ones generate in the last five."""
    trace = Trace(folder / "devices.trace.json", [f"d{n}" for n in range(devices)], 0.0)
    ledger = make_ledger(devices, trace=trace)
    spans = [span(*(("rollout", 5, 10) if n % 2 else ("train", 0, 5)), f"d{n}") for n in range(devices)]
    ledger.add(activity_report(*spans))
    ledger.close(10, "step 1")
    return trace.path


def shares(lanes: Answer, lane: int, kind: str) -> list[int]:
    kinds = len(lanes["kinds"])
    return [lanes["shares"][lane][column * kinds + lanes["kinds"].index(kind)] for column in range(lanes["columns"])]


def read(path: Path, columns: int, last_s: float | None = None) -> Answer:
    lanes = read_lanes(path, columns=columns, last_s=last_s)
    assert lanes is not None
    return lanes


def test_a_lane_shows_what_its_device_did(tmp_path: Path) -> None:
    lanes = read(traced(tmp_path, 2), columns=4)
    assert lanes["names"] == ["d0", "d1"] and (lanes["start"], lanes["until"]) == (0.0, 10.0)
    assert shares(lanes, 0, "train") == [WHOLE, WHOLE, 0, 0] and shares(lanes, 0, "idle") == [0, 0, WHOLE, WHOLE]
    assert shares(lanes, 1, "rollout") == [0, 0, WHOLE, WHOLE]
    assert lanes["totals"][0][lanes["kinds"].index("train")] == 0.5
    assert lanes["steps"] == [("step 1", 10.0)]


def test_what_came_after_the_last_step_is_no_step(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "devices.trace.json", ["d0"], 0.0)
    ledger = make_ledger(1, trace=trace)
    for until, label in ((10, "step 1"), (20, "step 2"), (21, END)):
        ledger.close(until, label)
    lanes = read(trace.path, columns=2)
    assert [label for label, _ in lanes["steps"]] == ["step 1", "step 2"] and lanes["until"] == 21.0


def test_of_the_last_seconds(tmp_path: Path) -> None:
    lanes = read(traced(tmp_path, 2), columns=2, last_s=2.0)
    assert lanes["start"] == 8.0 and shares(lanes, 0, "idle") == [WHOLE, WHOLE]
    assert shares(lanes, 1, "rollout") == [WHOLE, WHOLE]


@pytest.mark.parametrize("devices", [MAX_LANES, MAX_LANES + 1, 3 * MAX_LANES])
def test_many_devices_are_averaged(tmp_path: Path, devices: int) -> None:
    lanes = read(traced(tmp_path, devices), columns=2)
    assert len(lanes["names"]) == len(lanes["shares"]) <= MAX_LANES
    group = -(-devices // MAX_LANES)
    assert lanes["names"][0] == ("d0" if group == 1 else f"d0 to d{group - 1}")
    assert shares(lanes, 0, "train")[0] == round(WHOLE * -(-group // 2) / group)


@pytest.mark.parametrize("text", ["[1,2]", '{"name": "x"}', "1", '{"pid": 1}', '{"pid": 2, "ph": "X", "name": "x"}'])
def test_of_another_programs_trace_there_is_nothing(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "devices.trace.json"
    trace.write_text(f"[\n{text},\n")
    assert read_lanes(trace, columns=10) is None


def test_before_the_first_step_there_is_nothing(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "devices.trace.json", ["d0"], 0.0)
    assert read_lanes(trace.path, columns=10) is None
