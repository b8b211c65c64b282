"""Runs of which something is killed while agents work, in the run or in a runner outside of it; what they trained."""

from __future__ import annotations

import os
import socket
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from seamless_verl.client import AdminFile
from seamless_verl.journal import SessionSummary
from support.paths import DATA, ROOT

ONE_RECORD_S = 5.0  # what became of a step's groups is recorded at once; the same step of a later start comes later


def trained_steps(journal: Path) -> dict[int, list[str]]:
    """The prompts that each step trained, by its last record: earlier ones were undone by a kill."""
    steps: defaultdict[int, list[str]] = defaultdict(list)
    last: dict[int, float] = {}
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as db:
        query = "SELECT uid, step, at FROM group_outcomes WHERE outcome='trained' ORDER BY n"
        for uid, step, at in db.execute(query):
            if at - last.get(step, at) > ONE_RECORD_S:
                steps[step].clear()
            last[step] = at
            steps[step].append(uid)
    return steps


def kept(session: SessionSummary) -> bool:
    return session.outcome == "queued" or session.outcome.startswith("step")


@contextmanager
def no_runner(folder: Path) -> Iterator[None]:
    yield


@contextmanager
def runner(folder: Path) -> Iterator[None]:
    """A process outside of the run, which runs its agents, also while the run is away."""
    admin = AdminFile.beside(folder / "checkpoints" / "trajectories.sqlite")
    agent = f"patient={DATA / 'runner_agent.py'}:patient"
    command = [sys.executable, "-m", "seamless_verl.cli", "runner", "--slots", "64", "--agent", agent]
    waiting = f"until [ -e {admin} ]; do sleep 0.2; done; exec {' '.join(command)} --admin-file {admin}"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with (folder / "runner.txt").open("w") as log:
        process = subprocess.Popen(["bash", "-c", waiting], env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield
        assert process.poll() is None, (folder / "runner.txt").read_text()
    finally:
        process.kill()
        process.wait()


AGENTS = {"own": (no_runner, "openai_loops.yaml", "slow"), "in a runner": (runner, "runner_loops.yaml", "patient")}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
