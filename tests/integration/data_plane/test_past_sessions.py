"""Sessions that have ended leave a data plane as large as it was: what it remembers of them is bounded."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
import ray
import uvloop
from support.many_sessions import KINDS, STEP, Run, all_that_is_remembered
from support.plane import collect_garbage, plane
from support.runner_plane import runner_plane

from seamless_verl.client import AdminFile
from seamless_verl.data_plane import lease_book
from seamless_verl.data_plane.client import await_reply
from seamless_verl.gateway import sessions as session_table
from seamless_verl.rollout import precedence, routing

pytestmark = pytest.mark.integration
MIB = 1 << 20
FEW = 64  # remembered of each kind
FILLING, LOOKS = 12, 10  # steps: until all is full, and each time as many from then on
SLACK = 0.25  # blocks of memory a session: what is kept with a key of each session of some kinds is more
SLACK_MIB = 1.5  # what is larger is in no such block, or in none of Python's
JOURNAL_GIB = 0.02
EVERY = 20 * STEP  # sessions, of which the plane is looked at in the long test
# Python doubles the table of a full dict that forgets its first key for each new one, once: after a third more.
ALL_FULL = precedence.REMEMBERED * 4 // 3 + EVERY
LEVEL_MIB = 3.0
FILLING_KIB = 6.0  # a session, until all is full: measured 1.6, with Python's doublings of tables


@pytest.fixture
def few_remembered(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="seamless_verl")  # pytest keeps each message and each warning
    for module in (lease_book, session_table):
        monkeypatch.setattr(module, "REMEMBERED", FEW)
    monkeypatch.setattr(routing, "RANKINGS", FEW)
    monkeypatch.setattr(precedence.Remembered.__init__, "__defaults__", (FEW,))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(300)
def test_what_a_data_plane_remembers_of_past_sessions_is_bounded(
    nano: Path, tmp_path: Path, few_remembered: None
) -> None:
    # As Ray runs it; asyncio's own loop keeps ended timers a while.
    blocks, size = zip(*uvloop.run(held_by_a_plane(nano, tmp_path)), strict=True)
    sessions = LOOKS * STEP
    seen = f"in {sessions} sessions, three times: {blocks} blocks of memory, {size} MiB"
    sys.stdout.write(f"\n{seen}\n")
    # What is kept of each session is added each time. What the process does once, as a cache that it fills, is not.
    assert min(after - before for before, after in pairwise(blocks)) / sessions < SLACK, seen
    assert min(after - before for before, after in pairwise(size)) < SLACK_MIB, seen


async def held_by_a_plane(nano: Path, tmp_path: Path) -> list[tuple[float, float]]:
    """Blocks of memory and MiB, each the median of as many looks, three times one after another."""
    async with runner_plane(nano, tmp_path / "journal.sqlite", journal_gib=JOURNAL_GIB) as local:
        assert local.sessions is not None
        local.fleet._replicas["a"].engine.seen = deque(maxlen=FEW)  # type: ignore[attr-defined]

        async def commit(version: int) -> None:
            await local.execute("commit", version)
            await local.execute("update_weights", ["a"], version, [])

        found = AdminFile.read(local.sessions.admin_file)
        async with Run(found, lambda name: getattr(local, name), commit, kinds=KINDS, group=4) as run:
            await held_after(run, FILLING)
            looks = [[await held_after(run, 1) for _ in range(LOOKS)] for _ in range(3)]
            return [(median(blocks for blocks, _ in some), median(size for _, size in some)) for some in looks]


async def held_after(run: Run, steps: int) -> tuple[int, float]:
    """Small blocks of memory that Python has after so many steps more, and MiB that the process alone has."""
    for _ in range(steps):
        await run.train_step()
    gc.collect()
    return sys.getallocatedblocks(), psutil.Process().memory_full_info().uss / MIB


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_data_plane_is_level_when_all_that_it_remembers_is_full(nano: Path, tmp_path: Path) -> None:
    """In a process of its own, and at the real bounds. SEAMLESS_SESSIONS says how many: with fewer than 100,000
    it only shows that they take little."""
    sessions = int(os.environ.get("SEAMLESS_SESSIONS", 2 * EVERY))
    with plane(nano / "model", tmp_path, replicas=1, delay_s=0.0, journal_gib=JOURNAL_GIB) as running:
        process = psutil.Process(running.pids()[0])
        await asyncio.to_thread(running.commit, 1)

        def method(name: str) -> Any:
            actor_method = getattr(running.first, name)
            return lambda *arguments: await_reply(actor_method.remote(*arguments), cancels=True)

        async def commit(version: int) -> None:
            await asyncio.to_thread(running.commit, version)

        found = AdminFile.read(AdminFile.beside(str(running.gateway.journal_of(0, str(tmp_path)))))
        sizes, began = dict[int, float](), time.monotonic()
        async with Run(found, method, commit, kinds=[all_that_is_remembered], group=1) as run:
            while run.ended < sessions:
                await run.train_step()
                if run.ended % EVERY == 0:
                    ray.get(running.first.__ray_call__.remote(collect_garbage))
                    sizes[run.ended] = process.memory_full_info().uss / MIB
                    row = f"{run.ended:>9,} {sizes[run.ended]:8.1f} MiB {time.monotonic() - began:6.0f} s"
                    sys.stdout.write(f"{row}\n")
                    sys.stdout.flush()
    grown = max(sizes.values()) - sizes[EVERY]
    assert grown * 1024 / (max(sizes) - EVERY) < FILLING_KIB, sizes
    full = {ended: size for ended, size in sizes.items() if ended > ALL_FULL}
    if full:
        assert max(full.values()) - min(full.values()) < LEVEL_MIB, full
