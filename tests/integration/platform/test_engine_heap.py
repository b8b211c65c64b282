"""oneDNN's cache of kernels by shape, which the CPU platform makes small: by default an engine grows for hours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

from seamless_verl.platform.detect import set_cpu_environment

pytestmark = [pytest.mark.integration, pytest.mark.long]
CAPACITY = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
BATCHES = 60


def grown(model: Path, capacity: str | None) -> float:
    """How much an engine's heap grew, in MiB, with this capacity or that of the platform."""
    environ = {key: value for key, value in os.environ.items() if key != CAPACITY}
    environ |= {} if capacity is None else {CAPACITY: capacity}
    set_cpu_environment(environ, cores={min(os.sched_getaffinity(0))}, devices=1, pin=True)
    command = [sys.executable, str(ROOT / "tests/support/engine_heap.py"), str(model), str(BATCHES)]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return float(next(line.split()[1] for line in run.stdout.splitlines() if line.startswith("GREW ")))


def test_an_engine_does_not_grow_with_the_shapes_of_its_batches(nano: Path) -> None:
    assert grown(nano / "model", None) < 8


def test_it_would_grow_with_onednns_own_capacity(nano: Path) -> None:
    """Else the setting is not needed any more."""
    assert grown(nano / "model", "1024") > 16
