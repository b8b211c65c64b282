"""Kill -9 of every process of a run, again and again at random moments: the same command goes on, and no group is
trained twice or generated twice.

SEAMLESS_KILLS is how often the run is killed, 2 by default.
"""

from __future__ import annotations

import os
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.job import AGENT, Job
from support.killed_runs import AGENTS, free_port, kept, runner, trained_steps
from support.paths import DATA

from seamless_verl.journal import JournalReader, Stage

pytestmark = [pytest.mark.integration, pytest.mark.long]
KILLS = int(os.environ.get("SEAMLESS_KILLS", "2"))
STEPS, BATCH, GROUP = 3 * (KILLS + 1), 8, 4
BEFORE_KILL_S = 4.0  # at most, after the first step of a start
OPTIONS = AGENT | {
    "trainer__total_training_steps": STEPS,
    "trainer__save_freq": 1,
    "trainer__max_actor_ckpt_to_keep": 2,
    "trainer__resume_mode": "auto",
    "seamless__max_staleness": 1,
}


def start(folder: Path, data: Path, number: int, temporary: Path, options: dict[str, Any]) -> Job:
    """The same command each time, with the same TMPDIR; each start has its own log and metrics."""
    overrides = OPTIONS | options | {"trainer__default_local_dir": folder / "checkpoints"}
    return Job(folder / f"start-{number}", data, overrides, temporary=temporary).start()


def kill(job: Job) -> None:
    """All processes at one moment: they are stopped first, so that none of them sees another one's end."""
    assert job.process is not None
    command, stopped = psutil.Process(job.process.pid), dict[int, psutil.Process]()
    while found := [one for one in (command, *job.descendants()) if one.pid not in stopped]:
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
            stopped[process.pid] = process
    for process in stopped.values():
        with suppress(psutil.NoSuchProcess):
            process.kill()
    job.process.wait()
    assert not psutil.wait_procs(stopped.values(), timeout=60)[1]


def last_checkpoint(folder: Path) -> int:
    return int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


def ended_since_checkpoint(folder: Path) -> int:
    """Sessions whose agents have ended since the last checkpoint."""
    since = (folder / "checkpoints" / "latest_checkpointed_iteration.txt").stat().st_mtime
    with closing(sqlite3.connect(f"file:{folder}/checkpoints/trajectories.sqlite?mode=ro", uri=True)) as db:
        handing = list(Stage).index(Stage.HANDING)
        query = "SELECT COUNT(*) FROM stages WHERE stage=? AND at > ?"
        return int(db.execute(query, (handing, since)).fetchone()[0])


def begun_since_checkpoint(folder: Path) -> int:
    """Open sessions that have a reply, of those that were opened since the last checkpoint."""
    since = (folder / "checkpoints" / "latest_checkpointed_iteration.txt").stat().st_mtime
    sessions = JournalReader(folder / "checkpoints" / "trajectories.sqlite").sessions()
    return sum(one.stage is Stage.OPEN and one.calls > 0 and one.opened_at > since for one in sessions)


def finished_groups(journal: Path, checkpoint: int) -> dict[str, set[str]]:
    """The sessions of each group that was finished, and that the checkpoint has not trained, by its prompt."""
    trained = {uid for step, uids in trained_steps(journal).items() if step <= checkpoint for uid in uids}
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for session in JournalReader(journal).sessions():
        if session.uid not in trained and kept(session):
            groups[session.uid].add(session.session_id)
    return {uid: sessions for uid, sessions in groups.items() if len(sessions) == GROUP}


@pytest.mark.parametrize("runners, loops, agent", AGENTS.values(), ids=AGENTS)
def test_nothing_is_begun_twice(nano: Path, tmp_path: Path, runners: Any, loops: str, agent: str) -> None:
    options = {
        "actor_rollout_ref__rollout__agent__agent_loop_config_path": DATA / loops,
        "actor_rollout_ref__rollout__agent__default_agent_loop": agent,
        "seamless__gateway__port": free_port(),
    }
    journal, chance = tmp_path / "checkpoints" / "trajectories.sqlite", random.Random(time.time())
    temporary, finished = Path(tempfile.mkdtemp(prefix="t")), dict[str, set[str]]()  # short, for sockets
    totals: Counter[str] = Counter()
    with runners(tmp_path):
        for number in range(KILLS):
            job = start(tmp_path, nano, number, temporary, options)
            job.wait_for(f"step:{1 if number == 0 else last_checkpoint(tmp_path) + 1} ")
            time.sleep(chance.random() * BEFORE_KILL_S)
            # One kill at least has work to lose.
            while number == KILLS - 1 and not (ended_since_checkpoint(tmp_path) and begun_since_checkpoint(tmp_path)):
                time.sleep(0.02)
            kill(job)
            totals.update(resumed(job))
            checkpoint = last_checkpoint(tmp_path)
            found = finished_groups(journal, checkpoint)
            sys.stdout.write(f"\nkill {number}: checkpoint {checkpoint}, finished groups not trained {len(found)}; ")
            sys.stdout.write(f"this start {resumed(job)}")
            finished |= found
        job = start(tmp_path, nano, KILLS, temporary, options).finish()
    totals.update(resumed(job))
    sys.stdout.write(f"\nlast start {resumed(job)}; all {dict(totals)}\n")
    check_trained_once(journal)
    assert len(list((tmp_path / "checkpoints").glob("global_step_*"))) == 2, "earlier starts left theirs"
    check_sessions(journal, finished)
    assert totals["resumed/sessions"] > 0 and totals["resumed/begun_again/newer_weights"] == 0
    if runners is runner:
        assert totals["resumed/leases"] > 0, "no open session went on"
    else:
        assert totals["sessions/repeated_calls"] > 0, "no agent that began again got its replies"
    steps = job.metrics()
    assert steps[STEPS]["tokens/generated"] > 0  # the first step of a start may train what earlier ones generated
    for metrics in steps.values():
        dropped = sum(value for name, value in metrics.items() if name.startswith("tokens/dropped/"))
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + dropped
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] <= 1


def check_sessions(journal: Path, finished: dict[str, set[str]]) -> None:
    """The sessions of groups that were finished at a kill are those that were trained."""
    sessions = JournalReader(journal).sessions()
    outcomes = {session.session_id: session for session in sessions}
    for uid, ids in finished.items():
        assert all(kept(outcomes[name]) for name in ids), f"a finished session of {uid} is lost"
        assert {session.session_id for session in sessions if session.uid == uid and kept(session)} == ids


def check_trained_once(journal: Path) -> None:
    steps = trained_steps(journal)
    assert steps.keys() == set(range(1, STEPS + 1))
    assert {len(uids) for uids in steps.values()} == {BATCH}
    assert set(Counter(uid for uids in steps.values() for uid in uids).values()) == {1}, "a group was trained twice"


def resumed(job: Job) -> dict[str, float]:
    """What this start took up, and what it began again."""
    last = job.metrics()[max(job.metrics())]
    return {name: value for name, value in last.items() if name.startswith(("resumed/", "sessions/rep")) and value}
