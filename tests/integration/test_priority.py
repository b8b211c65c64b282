"""A thread goes before others for as long as it says, where the system lets it, and is as it was after that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
FIRST = """
import os
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
"""
THREAD = """
import os
import threading
from contextlib import suppress

from seamless_verl.platform.priority import before_helpers

if os.environ["BATCH"]:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
if os.environ["NOBODY"]:
    os.setuid(65534)
policy = lambda: os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
said = [policy()]
with suppress(ZeroDivisionError), before_helpers():
    said.append(policy())
    started = threading.Thread(target=lambda: said.append(policy()))
    started.start()
    started.join()
    1 / 0
with before_helpers():
    said.append(policy())
print(*said, policy())
"""


def said(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    there = os.environ | {"BATCH": "", "NOBODY": "", "PYTHONPATH": str(Path(__file__).parents[2])} | env
    return subprocess.run([sys.executable, "-c", script], env=there, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("env", [{}, {"BATCH": "1"}, {"NOBODY": "1"}, {"BATCH": "1", "NOBODY": "1"}], ids=str)
def test_a_thread_goes_first_and_back_again(env: dict[str, str]) -> None:
    may = said(FIRST).returncode == 0 and "NOBODY" not in env
    if "NOBODY" in env and os.getuid() != 0:
        pytest.skip("only root can become nobody")
    done = said(THREAD, **env)
    before, within, started, again, after = done.stdout.split() or [done.stderr] * 5
    usual = str(os.SCHED_BATCH if "BATCH" in env else os.SCHED_OTHER)
    assert (before, after) == (usual, usual)
    assert within == again == (str(os.SCHED_FIFO) if may else usual)
    assert started == (str(os.SCHED_OTHER) if may else usual)
