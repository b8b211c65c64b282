"""What is seen of a run's devices from outside: processes that are pinned to a core, and how busy they are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from seamless_verl.tools.compare.machine import CoreUse, UseSample, UseSampler, busy_ns, idle_between, shares

pytestmark = pytest.mark.integration
PINNED = "import os, sys, time; os.sched_setaffinity(0, [{core}]); print('ready', flush=True); {work}"
BUSY, IDLE = "exec('while True: pass')", "time.sleep(600)"


@pytest.fixture
def two_processes() -> Iterator[tuple[int, int]]:
    """One that computes on the first core, and one that sleeps on the second; their cores."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("it needs two cores")
    started = [
        subprocess.Popen([sys.executable, "-c", PINNED.format(core=core, work=work)], stdout=subprocess.PIPE)
        for core, work in zip(cores, (BUSY, IDLE), strict=True)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    while psutil.Process(started[1].pid).status() != psutil.STATUS_SLEEPING:
        time.sleep(0.01)
    yield cores[0], cores[1]
    for process in started:
        process.kill()
        process.communicate()


def test_a_core_is_busy_while_its_process_runs_or_waits_for_it(two_processes: tuple[int, int]) -> None:
    use = CoreUse(os.getpid(), two_processes)
    use.read()
    time.sleep(3.0)
    busy, idle = use.read()
    assert busy > 0.9 and idle < 0.1


def test_what_is_not_pinned_or_pinned_elsewhere_is_not_seen(two_processes: tuple[int, int]) -> None:
    assert set(CoreUse(os.getpid(), two_processes[:1]).find().values()) == {two_processes[0]}
    assert CoreUse(os.getpid(), ()).read() == ()


def test_a_process_that_has_ended_has_no_time() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert busy_ns(process.pid) is None


def test_the_sampler_keeps_what_it_read(two_processes: tuple[int, int]) -> None:
    began = time.monotonic()
    sampler = UseSampler(CoreUse(os.getpid(), two_processes).read)
    while len(sampler.samples) < 3:
        assert time.monotonic() - began < 30
        time.sleep(0.05)
    sampler.close()
    idle = idle_between(sampler.samples[1:], began, time.monotonic())
    assert idle is not None and 0.4 < idle < 0.6


def test_idle_time_is_weighed_by_the_length_of_samples_within_the_time() -> None:
    samples = [UseSample(0, 1, (0.0, 0.0)), UseSample(1, 2, (1.0, 0.5)), UseSample(2, 5, (0.5, 0.5))]
    assert idle_between(samples, 1, 5) == pytest.approx(1 - (0.75 + 1.5) / 4)
    assert idle_between(samples, 6, 7) is None
    assert shares({0: 3.0, 2: 0.5}, [0, 1, 2], 2.0) == (1.0, 0.0, 0.25)
