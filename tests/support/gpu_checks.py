"""Checks for the runner's own tests."""

from __future__ import annotations

import subprocess
from typing import Any

from gpu.place import Place, SkippedError


def hangs(place: Place) -> None:
    """Reports a figure, starts a process that leaves its group, and never ends."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    place.report("begun", child=child.pid)
    child.wait()


def fails(place: Place) -> None:
    place.report("before", figure=1)
    raise RuntimeError("not as it should be")


def skips(place: Place) -> None:
    raise SkippedError("nothing to check here")


def passes(place: Place) -> Any:
    place.report("folder", empty=not list(place.folder.iterdir()))
