"""Folders of the repository, and the environment of the processes and actors that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
DATA = TESTS / "support" / "data"  # what a job's settings name: agents, a reward, agent loops
RECIPES = ROOT / "recipes"


def child_environment() -> dict[str, str]:
    """Variables of a process or an actor that imports `seamless_verl` and `support`: on the CPU, one thread each."""
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, TESTS))),
        "VERL_PLATFORM": "cpu",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
