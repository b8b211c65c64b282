"""A run as a table and as JSON, and whether it shows what it should."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from seamless_verl.bench.gateway.measuring import Measured
from seamless_verl.bench.gateway.record import RecordCost

MS = 1000.0
ADDED = {"first_p50": "first_p50", "first_p99": "first_p99", "p50": "late_p50", "p99": "late_p99"}
"""What the latency added to the first byte and to the whole reply is the difference of."""
HEAD = (
    *("engine", "calls", "arm", "calls/s", "CPU ms/call", "median ms", "p99 ms"),
    *("added to first: median", "p99", "added to whole: median", "p99"),
)


def rows(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One for each arm, shape and pace: medians over the rounds, in milliseconds."""
    return [
        {
            "pace": asdict(one.pace),
            "concurrent": one.shape.concurrent,
            "callers": one.shape.callers,
            "stream": one.shape.stream,
            "arm": arm,
            "rate": one.middle(arm, "rate"),
            **{f"{what}_ms": one.middle(arm, what) * MS for what in ("first_p50", "first_p99", "p50", "p99", "cpu")},
            **{f"added_{what}_ms": one.added(arm, of) * MS for what, of in ADDED.items()},
            "rates": [stint.rate for stint in stints],
        }
        for one in measured
        for arm, stints in one.stints.items()
    ]


def table(measured: Sequence[Measured]) -> str:
    lines: list[tuple[str, ...]] = [HEAD]
    for one in measured:
        for arm in one.stints:
            numbers = (one.middle(arm, "rate"), *(one.middle(arm, what) * MS for what in ("cpu", "p50", "p99")))
            added = ("" if arm == "direct" else f"{one.added(arm, what) * MS:.2f}" for what in ADDED.values())
            lines.append((one.pace.name, one.shape.name, arm, *(f"{value:.2f}" for value in numbers), *added))
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def times_litellm(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """By pace and shape: our calls a second over LiteLLM's, and its CPU seconds a call over ours; medians of rounds."""
    return {
        f"{one.pace.name}, {one.shape.name}": {
            "rate": _median_ratio(one, "gateway", "litellm", "rate"),
            "cpu": _median_ratio(one, "litellm", "gateway", "cpu"),
        }
        for one in measured
        if "litellm" in one.stints
    }


def _median_ratio(measured: Measured, above: str, below: str, what: str) -> float:
    pairs = zip(measured.stints[above], measured.stints[below], strict=True)
    return float(median(getattr(a, what) / getattr(b, what) for a, b in pairs))


def report(measured: Sequence[Measured], record: RecordCost, *, pinning: str) -> dict[str, Any]:
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "pinning": pinning}
    return {
        "machine": machine,
        "rows": rows(measured),
        "times_litellm": times_litellm(measured),
        "record": asdict(record),
    }
