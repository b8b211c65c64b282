"""Reads what a run's lending policy saw and decided, so that another policy, or the same, can decide it again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seamless_verl.resources.lending.policy import (
    Assignment,
    Costs,
    Decision,
    Demand,
    DeviceView,
    LendingReason,
    LendingView,
    Tag,
    Use,
)

Recorded = tuple[LendingView, Decision]


def read_recording(file: Path) -> Iterator[tuple[str, dict[str, Any], list[Recorded]]]:
    """For each start of the run: the policy's name and state, and its views with what was decided."""
    parts: list[tuple[str, dict[str, Any], list[Recorded]]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "view" in row:
            parts[-1][2].append((_view(row["view"]), {k: _assignment(v) for k, v in row["decision"].items()}))
        else:
            parts.append((row["policy"], row["state"], []))
    yield from parts


def _view(row: dict[str, Any]) -> LendingView:
    devices = tuple(_device(device) for device in row["devices"])
    return LendingView(
        **{**row, "devices": devices, "demand": Demand(**row["demand"]), "costs": Costs(**row["costs"])},
    )


def _device(row: dict[str, Any]) -> DeviceView:
    return DeviceView(**{**row, "tags": frozenset(map(Tag, row["tags"])), "use": Use(row["use"])})


def _assignment(row: dict[str, Any]) -> Assignment:
    return Assignment(Use(row["use"]), LendingReason(row["reason"]), row["carry"])
