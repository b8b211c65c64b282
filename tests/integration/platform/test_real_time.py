"""A process has real-time priority inside the block, where the system allows it, and its former policy after."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
from support.paths import child_environment

from seamless_verl.platform.cores import POLICY, real_time_priority

pytestmark = pytest.mark.integration
REAL_TIME = """
import os
if os.environ["NOBODY"]:
    os.setuid(65534)
os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
"""
PROCESS = """
import os
import threading
from contextlib import suppress

from seamless_verl.platform.cores import real_time_priority

if os.environ["BATCH"]:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
if os.environ["NOBODY"]:
    os.setuid(65534)
ends, over = threading.Event(), threading.Event()
of = lambda thread: os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK
staying, ending = (threading.Thread(target=event.wait, daemon=True) for event in (over, ends))
staying.start(), ending.start()
policies = lambda: [of(0), of(staying.native_id)]
found = policies()
with suppress(ZeroDivisionError), real_time_priority():
    ends.set(), ending.join()  # one ends within
    found += policies()
    started = threading.Thread(target=lambda: found.append(of(0)))
    started.start(), started.join()
    1 / 0
found += policies()
with real_time_priority():
    found += policies()
print(*found, *policies())
"""


def run(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = os.environ | child_environment() | {"BATCH": "", "NOBODY": ""} | env
    return subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("env", [{}, {"BATCH": "1"}, {"NOBODY": "1"}, {"BATCH": "1", "NOBODY": "1"}], ids=str)
def test_a_process_has_real_time_priority_and_its_policy_back(env: dict[str, str]) -> None:
    if "NOBODY" in env and os.getuid() != 0:
        pytest.skip("only root can become nobody")
    may = run(REAL_TIME, **env).returncode == 0
    if "NOBODY" not in env and not may:
        pytest.skip("a process may not have real-time priority here")
    usual = [os.SCHED_BATCH if "BATCH" in env else os.SCHED_OTHER] * 2
    within = [os.SCHED_FIFO] * 2 if may else usual
    started = [os.SCHED_OTHER if may else usual[0]]
    policies = [*usual, *within, *started, *usual, *within, *usual]
    done = run(PROCESS, **env)
    assert done.stdout.split() == list(map(str, policies)), done.stderr


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EINVAL, errno.ENOSYS])
def test_where_the_system_refuses_nothing_changes(refusal: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: int, policy: int, param: os.sched_param) -> None:
        asked.append(policy)
        raise OSError(refusal, os.strerror(refusal))

    asked = list[int]()
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with real_time_priority():
        pass
    assert asked == [POLICY]


def test_the_server_and_the_worker_extension_name_methods_that_exist() -> None:
    from vllm.platforms import current_platform

    from seamless_verl.platform.vllm.worker import HostWorker
    from seamless_verl.replica.engine_load import REAL_TIME_PRIORITY
    from seamless_verl.replica.worker_extension import BEFORE_LOAD

    assert callable(getattr(type(current_platform), REAL_TIME_PRIORITY)) and callable(getattr(HostWorker, BEFORE_LOAD))
