"""Draws a trace's timeline as a PNG: devices as lanes, kinds as colours, steps as ticks, the idle share of each lane.

A column of a lane is filled from below in the kinds' order, in proportion to what it was spent on, so that a long
run reads as a chart of shares and a short one as solid blocks. Pillow draws it; no display is needed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from seamless_verl.resources.ledger.activity import DeviceUse
from seamless_verl.resources.ledger.trace import COLUMN_OF, Timeline, read_timeline

Colour: TypeAlias = tuple[int, int, int]
COLOURS: dict[DeviceUse, Colour] = {
    DeviceUse.TRAIN: (36, 99, 176),
    DeviceUse.SYNC: (142, 85, 190),
    DeviceUse.SWITCH: (236, 142, 36),
    DeviceUse.ROLLOUT: (86, 178, 128),
    DeviceUse.IDLE: (222, 225, 229),
}
INK, SOFT, RULE, ALARM = (32, 36, 42), (112, 120, 130), (208, 212, 218), (196, 60, 48)
TITLE = "Device time"
SCALE = 2  # pixels of the file for one of the layout
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 1400, 130, 74, 128, 58
STEP_PIXELS, STEPS_A_BAR = 8, 4  # steps narrower than the one are drawn together, the other in a bar at least
ALARM_SHARE = 0.05  # idle beyond it is printed in the colour of alarm


def draw_timeline(trace: Path, picture: Path) -> Path:
    """Draws a trace, closed or not; raises ValueError when it holds no step."""
    columns = (WIDTH - LEFT - RIGHT) * SCALE
    image = Drawing(read_timeline(trace, columns=columns)).image
    picture.parent.mkdir(parents=True, exist_ok=True)
    partial = picture.with_name(f"{picture.name}.{os.getpid()}.tmp")
    image.save(partial, format="png")
    partial.replace(picture)
    return picture


class Drawing:
    """One picture; coordinates are the layout's, `SCALE` times as many pixels."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        lanes = len(timeline.devices)
        self.pitch = max(14.0, min(46.0, 760 / lanes))
        self.lane = self.pitch - (2 if self.pitch < 20 else 7)
        self.floor = TOP + self.pitch * lanes
        self.bar = bar_columns(timeline.grid.shape[1], len(timeline.steps))
        size = (WIDTH * SCALE, round((self.floor + BOTTOM) * SCALE))
        self.image = Image.new("RGB", size, (255, 255, 255))
        self.pen = ImageDraw.Draw(self.image)
        self._head()
        for lane, device in enumerate(timeline.devices):
            self._lane(lane, device)
        self._steps()
        self._axis()

    def _head(self) -> None:
        line = self.timeline
        whole = line.grid.sum(axis=(0, 1))
        shares = whole / max(whole.sum(), 1e-12)
        self._text((LEFT, 26), TITLE, 22, INK, "lm")
        devices, steps = _counted(len(line.devices), "device"), _counted(len(line.steps), "step")
        below = f"{devices}, {steps}, {_duration(line.until - line.start)}"
        since = f", from {_duration(line.start)} on" if line.start else ""
        bars = f"; each bar is {_duration(self.bar * line.column_s)}" if self.bar > 1 else ""
        self._text((LEFT, 52), below + since + bars, 13, SOFT, "lm")
        x = float(LEFT)
        for kind in DeviceUse:
            self._box(x, 72, x + 13, 85, COLOURS[kind])
            label = f"{kind} {shares[COLUMN_OF[kind]]:.1%}"
            self._text((x + 19, 79), label, 13, INK, "lm")
            x += 19 + self._width(label, 13) + 24
        self._text((WIDTH - RIGHT + 8, TOP - 12), "idle", 11, SOFT, "lm")

    def _lane(self, lane: int, device: str) -> None:
        top, idle = TOP + lane * self.pitch, float(self.timeline.idle[lane])
        pixels = lane_pixels(average_bars(self.timeline.shares[lane], self.bar), round(self.lane * SCALE))
        self.image.paste(Image.fromarray(pixels, "RGB"), (LEFT * SCALE, round(top * SCALE)))
        size = 10 if self.pitch < 20 else 12
        middle = top + self.lane / 2
        self._text((LEFT - 10, middle), self._fitted(device, size, LEFT - 20), size, INK, "rm")
        colour = ALARM if idle > ALARM_SHARE else INK
        self._text((WIDTH - RIGHT + 8, middle), f"{idle:.1%}", size, colour, "lm")

    def _steps(self) -> None:
        """A tick at each step's end above the lanes, a hairline through them, and labels at a round stride."""
        steps = self.timeline.steps
        room = (WIDTH - LEFT - RIGHT) / len(steps)
        widest = max(self._width(label, 10) for label, _ in steps)
        stride = next(n * 10**p for p in range(12) for n in (1, 2, 5) if n * 10**p * room > widest + 12)
        right = -math.inf  # where the last label ends
        for number, (label, end) in enumerate(steps, 1):
            x, half = self._x(end), self._width(label, 10) / 2
            middle = min(max(x, LEFT + half), WIDTH - RIGHT - half)
            labelled = number % stride == 0 and middle - half > right + 6
            if labelled:
                self._text((middle, TOP - 14), label, 10, SOFT, "mm")
                right = middle + half
            if labelled or room > 4:
                self._line(x, TOP - (7 if labelled else 4), x, TOP - 2, SOFT)
            if room > 40:
                self._line(x, TOP - 2, x, self.floor, INK)

    def _axis(self) -> None:
        base = self.floor + 2
        self._line(LEFT, base, WIDTH - RIGHT, base, RULE)
        for time in ticks(self.timeline.start, self.timeline.until):
            self._line(self._x(time), base, self._x(time), base + 5, SOFT)
            self._text((self._x(time), base + 15), _duration(time), 11, SOFT, "mm")
        self._text(((LEFT + WIDTH - RIGHT) / 2, base + 36), "time since the run's start", 11, SOFT, "mm")

    def _x(self, time: float) -> float:
        share = (time - self.timeline.start) / max(self.timeline.until - self.timeline.start, 1e-12)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def _text(self, at: tuple[float, float], text: str, size: int, colour: Colour, anchor: str) -> None:
        pixels = (at[0] * SCALE, at[1] * SCALE)
        self.pen.text(pixels, text, fill=colour, font=_font(size), anchor=anchor)

    def _width(self, text: str, size: int) -> float:
        return float(self.pen.textlength(text, font=_font(size))) / SCALE

    def _fitted(self, text: str, size: int, room: float) -> str:
        """The text cut to `room`; a long name keeps its end, in which devices differ."""
        cut = text
        while len(cut) > 2 and self._width(cut, size) > room:
            cut = "…" + cut[2:]
        return cut

    def _box(self, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
        box = [v * SCALE for v in (left, top, right, bottom)]
        self.pen.rounded_rectangle(box, radius=2 * SCALE, fill=colour)

    def _line(self, x0: float, y0: float, x1: float, y1: float, colour: Colour) -> None:
        self.pen.line([v * SCALE for v in (x0, y0, x1, y1)], fill=colour, width=SCALE // 2)


def bar_columns(columns: int, steps: int) -> int:
    """How many columns make a bar: one, unless steps are too narrow to be distinguished."""
    return 1 if columns >= STEP_PIXELS * steps else min(columns, math.ceil(STEPS_A_BAR * columns / steps))


def average_bars(shares: NDArray[np.float64], bar: int) -> NDArray[np.float64]:
    """Shares of [columns, kinds], averaged over `bar` columns each, same shape."""
    edges = np.arange(0, len(shares), bar)
    sizes = np.diff([*edges, len(shares)])
    return np.repeat(np.add.reduceat(shares, edges) / sizes[:, None], sizes, axis=0)


def lane_pixels(shares: NDArray[np.float64], height: int) -> NDArray[np.uint8]:
    """Shares of [columns, kinds] as uint8 RGB of [height, columns, 3]: each column stacked from below."""
    level = (height - 0.5 - np.arange(height)) / height
    tops = np.cumsum(shares, axis=1)
    kind = (level[:, None, None] >= tops[None, :, :] - 1e-9).sum(axis=2).clip(max=len(DeviceUse) - 1)
    palette = np.array([COLOURS[k] for k in DeviceUse], dtype=np.uint8)
    return np.asarray(palette[kind])


def ticks(start: float, until: float) -> Iterator[float]:
    """Round times in the window, about ten."""
    steps = (1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30)
    minutes = tuple(60 * m for m in (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720))
    wanted = max(until - start, 1e-3) / 10
    step = next((s for s in (*steps, *minutes) if s >= wanted), math.ceil(wanted / 86400) * 86400)
    return (n * step for n in range(math.ceil(start / step - 1e-9), math.floor(until / step + 1e-9) + 1))


def _duration(seconds: float) -> str:
    if seconds < 60:
        return (
            f"{seconds:.3f}".rstrip("0").rstrip(".") + " s" if seconds < 10 else f"{seconds:.1f} s".replace(".0 ", " ")
        )
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}" + ("" if number == 1 else "s")


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size * SCALE)
