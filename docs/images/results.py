"""Draws a comparison as SVG: reward against seconds, and tokens/s, each arm in its colour.

`python docs/images/results.py runs/compare/long_sums docs/images/results.svg` with the folder that `seamless-verl
compare` wrote. It needs pyarrow, as the comparison does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from concepts import GREY, WIDTH, box, line, text
from pyarrow import parquet

# Okabe and Ito's colours, which people with any kind of colour vision tell apart.
COLOURS = ("#666666", "#E69F00", "#56B4E9", "#0072B2")
TOP, BOTTOM, LEFT, MIDDLE, BARS = 44, 270, 60, 470, 670
Row = Mapping[str, Any]


def curve(steps: Sequence[Row]) -> list[tuple[float, float]]:
    """(seconds since the end of the first step, reward): of validations where there are several, else of steps."""
    name = "validation" if sum(step["validation"] is not None for step in steps) > 1 else "reward"
    return [(step["at_s"] - steps[0]["at_s"], step[name]) for step in steps if step[name] is not None]


def curves(steps: Sequence[Row], arm: str) -> Iterator[list[tuple[float, float]]]:
    """The curve of each run of the arm."""
    of = [step for step in steps if step["arm"] == arm]
    for run in dict.fromkeys((step["seed"], step["round"]) for step in of):
        yield curve([step for step in of if (step["seed"], step["round"]) == run])


def middle(runs: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean of the runs' curves, point by point."""
    points = zip(*runs, strict=False)
    return [(mean(x for x, _ in point), mean(y for _, y in point)) for point in points]


def rewards(steps: Sequence[Row], colours: Mapping[str, str]) -> Iterator[str]:
    """The left half: a thin line for each run, a thick one for their mean."""
    found = {arm: list(curves(steps, arm)) for arm in colours}
    every = [point for runs in found.values() for run in runs for point in run]
    longest, highest = max(x for x, _ in every), max(y for _, y in every)

    def placed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        width, height = MIDDLE - LEFT, BOTTOM - TOP
        return [(LEFT + x / longest * width, BOTTOM - y / highest * height) for x, y in points]

    yield text(LEFT, 24, "Reward, against seconds since the end of the first step")
    yield line([(LEFT, TOP), (LEFT, BOTTOM), (MIDDLE, BOTTOM)])
    yield text(LEFT - 6, TOP + 10, f"{highest:.2f}", colour=GREY, anchor="end")
    yield text(LEFT - 6, BOTTOM, "0", colour=GREY, anchor="end")
    yield text(MIDDLE, BOTTOM + 20, f"{longest:,.0f} s", colour=GREY, anchor="end")
    for arm, runs in found.items():
        for run in runs:
            yield f'<g opacity="0.35">{line(placed(run), colour=colours[arm])}</g>'
        yield line(placed(middle(runs)), colour=colours[arm]).replace('"1.5"', '"3"')


def speeds(runs: Sequence[Row], colours: Mapping[str, str]) -> Iterator[str]:
    """The right half: a bar for each arm's median tokens/s, and what it is to the first arm's."""
    values = {arm: median(run["tokens_per_s"] for run in runs if run["arm"] == arm) for arm in colours}
    first, most = next(iter(values.values())), max(values.values())
    yield text(MIDDLE + 40, 24, "Tokens trained in a second, with validations")
    for number, (arm, value) in enumerate(values.items()):
        y = TOP + 10 + 44 * number
        yield text(BARS - 8, y + 19, arm, anchor="end")
        yield box(BARS, y, value / most * (WIDTH - BARS - 100), 28, colours[arm])
        yield text(WIDTH - 96, y + 19, f"{value:,.0f}" + (f"  x {value / first:.2f}" if number else ""))


def main(folder: str, picture: str) -> None:
    runs = [run for run in parquet.read_table(Path(folder, "runs.parquet")).to_pylist() if run["tokens_per_s"]]
    steps = parquet.read_table(Path(folder, "steps.parquet")).to_pylist()
    colours = dict(zip(dict.fromkeys(run["arm"] for run in runs), COLOURS, strict=False))
    shapes = [*rewards(steps, colours), *speeds(runs, colours)]
    height = BOTTOM + 34
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    background = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    Path(picture).write_text("\n".join([head, background, *shapes, "</svg>"]) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3])
