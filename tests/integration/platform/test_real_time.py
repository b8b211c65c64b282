"""A process goes before others for as long as it says, where the system lets it, and is as it was after that."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from seamless_verl.platform.real_time import FIRST as FIRST_POLICY
from seamless_verl.platform.real_time import real_time_priority

pytestmark = pytest.mark.integration
FIRST = """
import os
if os.environ["NOBODY"]:
    os.setuid(65534)
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
    there = os.environ | {"BATCH": "", "NOBODY": "", "PYTHONPATH": str(Path(__file__).parents[3])} | env
    return subprocess.run([sys.executable, "-c", script], env=there, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("env", [{}, {"BATCH": "1"}, {"NOBODY": "1"}, {"BATCH": "1", "NOBODY": "1"}], ids=str)
def test_a_process_goes_first_and_back_again(env: dict[str, str]) -> None:
    if "NOBODY" in env and os.getuid() != 0:
        pytest.skip("only root can become nobody")
    may = said(FIRST, **env).returncode == 0
    if "NOBODY" not in env and not may:
        pytest.skip("a process may not go first here")
    usual = [os.SCHED_BATCH if "BATCH" in env else os.SCHED_OTHER] * 2
    within = [os.SCHED_FIFO] * 2 if may else usual
    started = [os.SCHED_OTHER if may else usual[0]]
    policies = [*usual, *within, *started, *usual, *within, *usual]
    done = said(PROCESS, **env)
    assert done.stdout.split() == list(map(str, policies)), done.stderr


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EINVAL, errno.ENOSYS])
def test_where_the_system_refuses_a_process_goes_as_before(refusal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: int, policy: int, param: os.sched_param) -> None:
        asked.append(policy)
        raise OSError(refusal, os.strerror(refusal))

    asked = list[int]()
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with real_time_priority():
        pass
    assert asked == [FIRST_POLICY]


def test_who_waits_for_a_load_and_who_loads_are_asked_by_the_names_that_they_have() -> None:
    from vllm.platforms import current_platform

    from seamless_verl.platform.vllm.worker import HostWorker
    from seamless_verl.replica.server import GOING_FIRST
    from seamless_verl.replica.worker_extension import BEFORE_LOAD

    assert callable(getattr(type(current_platform), GOING_FIRST)) and callable(getattr(HostWorker, BEFORE_LOAD))
