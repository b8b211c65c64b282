"""With tail batching a run at staleness 0 trains every prompt once an epoch, also if it is stopped between."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from support.job import AGENT, Job
from support.job_ends import leftovers, stopped
from support.paths import DATA

from seamless_verl.journal import GroupOutcome, JournalReader
from seamless_verl.tiny import make_arithmetic
from seamless_verl.tools.trajectories.recorded import recorded
from seamless_verl.trajectory.account import DropReason

pytestmark = [pytest.mark.integration, pytest.mark.long]
EPOCH, BATCH, SESSIONS, STOPPED = 12, 4, 4, 2
# Takes longer than the agents of a step take to begin, one after another, on a quick machine.
LONG_REPLY = 1500
LONG = {index for index in range(EPOCH) if index % 3 == 2}
TAILS = {
    **AGENT,
    "actor_rollout_ref__rollout__agent__agent_loop_config_path": DATA / "uneven_loops.yaml",
    "actor_rollout_ref__rollout__agent__default_agent_loop": "uneven",
    "actor_rollout_ref__rollout__max_model_len": 1600,
    "actor_rollout_ref__actor__ppo_mini_batch_size": 2,
    "data__train_batch_size": BATCH,
    "data__max_response_length": LONG_REPLY + 10,
    "data__shuffle": False,
    "seamless__max_staleness": 0,
    "seamless__tail_batching": 0.5,
    "trainer__v1__seamless__parameter_sync_step": 2,
    "trainer__total_epochs": 2,
    "trainer__save_freq": STOPPED,
    "trainer__resume_mode": "auto",
}


def test_every_prompt_is_trained_once_an_epoch_and_none_waits_for_one_tail(nano: Path, tmp_path: Path) -> None:
    """Each step of an epoch begins 6 prompts of 12, of which 2 are long, and trains 4; the third trains the long ones.

    The run is stopped after its second step, when all long ones are deferred.
    """
    make_arithmetic(tmp_path, 0, EPOCH, EPOCH)
    options, record = TAILS | {"data__train_files": tmp_path / "train.parquet"}, tmp_path / "record.jsonl"
    env = {"RECORD": str(record), "LONG_REPLY": str(LONG_REPLY)}
    job = Job(tmp_path / "run", nano, options, env)
    stopped(job, f"step:{STOPPED} ", signal.SIGTERM)
    first = job.metrics()
    (job.folder / "metrics.jsonl").unlink()
    restarted = time.time()
    resumed = Job(tmp_path / "run", nano, options, env).start().finish()
    assert leftovers(resumed) == []
    steps = {step: row for step, row in first.items() if step <= STOPPED} | resumed.metrics()
    assert steps.keys() == set(range(1, 7))
    check_steps(steps)
    check_prompts(job.folder / "checkpoints" / "trajectories.sqlite", record, restarted)


def check_steps(steps: dict[int, dict[str, float]]) -> None:
    """All tokens of a step are of its own version, and all that were generated are on the account."""
    for metrics in steps.values():
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        dropped = sum(value for name, value in metrics.items() if name.startswith("tokens/dropped/"))
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + dropped
        assert metrics["calls/failed"] == metrics["groups/dropped"] == metrics["fleet/dead"] == 0
    assert [steps[step]["seamless/tail/deferred"] for step in range(1, 7)] == [2, 4, 0, 2, 4, 0]
    assert [steps[step]["response_length/max"] for step in range(1, 7)] == [4, 4, LONG_REPLY, 4, 4, LONG_REPLY]
    assert (steps[6]["seamless/tail/steps"], steps[6]["seamless/tail/begun_again"]) == (2, 8)
    assert steps[6]["tokens/dropped/deferred"] > 0 == steps[6]["tokens/dropped/cancelled"]


def check_prompts(journal: Path, record: Path, restarted: float) -> None:
    """Each prompt's sessions are trained once an epoch; what the stopped run did after its checkpoint is left out."""
    index_of = dict(json.loads(line) for line in record.read_text().splitlines())
    reader = JournalReader(journal)
    found = [session for name in index_of if (session := reader.read(name)) is not None]
    trained, deferred = dict[int, Counter[int]](), Counter[int]()
    for session in found:
        if session.group is not None and session.group.step > STOPPED and session.opened_at < restarted:
            continue
        if session.group is not None and session.group.outcome is GroupOutcome.TRAINED:
            trained.setdefault(session.group.step, Counter())[index_of[session.session_id]] += 1
        elif recorded(session).dropped is DropReason.DEFERRED:
            deferred[index_of[session.session_id]] += 1
    for epoch in (0, 1):
        whole = sum((trained[3 * epoch + step] for step in (1, 2, 3)), Counter())
        assert whole == dict.fromkeys(range(EPOCH), SESSIONS)
        assert trained[3 * epoch + 3].keys() == LONG
    assert deferred.keys() == LONG
