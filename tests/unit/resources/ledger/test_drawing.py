"""The timeline's picture: colours where the time went, whatever the number of devices and steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from support.ledger import activity_report, make_ledger, span

from seamless_verl.resources.ledger import BUSY, DeviceUse, Trace
from seamless_verl.resources.ledger.drawing import (
    ALARM,
    COLOURS,
    LEFT,
    RIGHT,
    SCALE,
    TOP,
    WIDTH,
    average_bars,
    bar_columns,
    draw_timeline,
    lane_pixels,
    ticks,
)

CODE = np.array([1 << 16, 1 << 8, 1], dtype=np.uint32)  # a colour as one number


def drawn(folder: Path, devices: int, steps: int, *, busy: float = 1.0) -> NDArray[np.uint8]:
    """Each step's ten seconds hold the kinds in turn, `busy` of the time; pixels of [height, width, 3]."""
    names = [f"d{n}" for n in range(devices)]
    trace = Trace(folder / "trace.json", names, 0.0)
    ledger, slot = make_ledger(devices, observers=[trace]), 2.5
    for step in range(steps):
        starts = [(kind, 10 * step + n * slot) for n, kind in enumerate(BUSY)]
        ledger.add(activity_report(*(span(kind, at, at + busy * slot, name) for name in names for kind, at in starts)))
        ledger.close(10 * step + 10, f"step {step + 1}")
    picture = draw_timeline(trace.path, folder / "new" / "timeline.png")
    trace.close()
    assert [path.name for path in picture.parent.iterdir()] == ["timeline.png"]
    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB"))


def lanes(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return pixels[TOP * SCALE :, LEFT * SCALE : (WIDTH - RIGHT) * SCALE]


def shares(pixels: NDArray[np.uint8]) -> dict[DeviceUse, float]:
    """Of the lanes' pixels that have a kind's colour."""
    values, counts = np.unique(lanes(pixels).astype(np.uint32) @ CODE, return_counts=True)
    found = dict(zip(values.tolist(), counts.tolist(), strict=True))
    of = {kind: found.get(int(np.dot(colour, CODE)), 0) for kind, colour in COLOURS.items()}
    return {kind: count / sum(of.values()) for kind, count in of.items()}


@pytest.mark.parametrize("devices,steps", [(1, 1), (2, 6), (64, 3), (3, 700)])
def test_each_kind_takes_its_share_of_the_picture(tmp_path: Path, devices: int, steps: int) -> None:
    pixels = drawn(tmp_path, devices, steps, busy=0.8)
    assert list(shares(pixels).values()) == pytest.approx([0.2] * len(DeviceUse), abs=0.025)
    assert pixels.shape[1] == WIDTH * SCALE and pixels.shape[0] < 1100 * SCALE


def test_kinds_are_drawn_where_they_happened(tmp_path: Path) -> None:
    pixels = drawn(tmp_path, 1, 1)
    row = lanes(pixels)[20]
    places = [round(len(row) * (n + 0.5) / 4) for n in range(4)]
    assert [tuple(row[x]) for x in places] == [COLOURS[kind] for kind in BUSY]


def test_idle_beyond_the_goal_is_printed_in_the_colour_of_alarm(tmp_path: Path) -> None:
    for busy, alarmed in ((0.97, False), (0.9, True)):
        folder = tmp_path / str(busy)
        folder.mkdir()
        margin = drawn(folder, 2, 2, busy=busy)[:, (WIDTH - RIGHT) * SCALE :]
        assert bool((margin == np.array(ALARM)).all(axis=2).any()) is alarmed


def test_a_column_is_stacked_from_below_in_the_order_of_kinds() -> None:
    column = lane_pixels(np.array([[0.5, 0.0, 0.25, 0.25, 0.0]]), 8)[::-1, 0]
    kinds = [DeviceUse.TRAIN] * 4 + [DeviceUse.SWITCH] * 2 + [DeviceUse.ROLLOUT] * 2
    assert [tuple(pixel) for pixel in column] == [COLOURS[kind] for kind in kinds]


def test_narrow_steps_are_drawn_together() -> None:
    assert bar_columns(2400, 300) == 1 and bar_columns(2400, 301) == 32 and bar_columns(10, 10_000) == 1
    shares = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert average_bars(shares, 2).tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 1.0]]


@pytest.mark.parametrize("until", [0.004, 1, 52.6, 103, 3600, 40_000, 3e6])
def test_there_are_about_ten_ticks(until: float) -> None:
    assert 4 <= len(list(ticks(0, until))) <= 12
    assert all(0.3 * until <= tick <= until for tick in ticks(0.3 * until, until))
