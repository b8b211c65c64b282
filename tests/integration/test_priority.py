"""A process goes before others for as long as it says, where the system lets it, and is as it was after that."""

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
PROCESS = """
import os
import threading
from contextlib import suppress

from seamless_verl.platform.priority import before_helpers

if os.environ["BATCH"]:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
if os.environ["NOBODY"]:
    os.setuid(65534)
ends, over = threading.Event(), threading.Event()
of = lambda thread: os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK
here, passing = (threading.Thread(target=event.wait, daemon=True) for event in (over, ends))
here.start(), passing.start()
policies = lambda: [of(0), of(here.native_id)]
said = policies()
with suppress(ZeroDivisionError), before_helpers():
    ends.set(), passing.join()  # one ends within
    said += policies()
    started = threading.Thread(target=lambda: said.append(of(0)))
    started.start(), started.join()
    1 / 0
said += policies()
with before_helpers():
    said += policies()
print(*said, *policies())
"""


def said(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    there = os.environ | {"BATCH": "", "NOBODY": "", "PYTHONPATH": str(Path(__file__).parents[2])} | env
    return subprocess.run([sys.executable, "-c", script], env=there, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("env", [{}, {"BATCH": "1"}, {"NOBODY": "1"}, {"BATCH": "1", "NOBODY": "1"}], ids=str)
def test_a_process_goes_first_and_back_again(env: dict[str, str]) -> None:
    may = said(FIRST).returncode == 0 and "NOBODY" not in env
    if "NOBODY" in env and os.getuid() != 0:
        pytest.skip("only root can become nobody")
    usual = [os.SCHED_BATCH if "BATCH" in env else os.SCHED_OTHER] * 2
    within = [os.SCHED_FIFO] * 2 if may else usual
    started = [os.SCHED_OTHER if may else usual[0]]
    policies = [*usual, *within, *started, *usual, *within, *usual]
    done = said(PROCESS, **env)
    assert done.stdout.split() == list(map(str, policies)), done.stderr


def test_who_loads_and_who_waits_for_it_are_asked_by_the_name_that_they_have() -> None:
    from vllm.platforms import current_platform

    from seamless_verl.platform.vllm.worker import HostWorker
    from seamless_verl.trainer.replica.extension import STANDING

    assert callable(getattr(type(current_platform), STANDING)) and callable(getattr(HostWorker, STANDING))
