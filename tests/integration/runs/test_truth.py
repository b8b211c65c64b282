"""What a run says of itself adds up: failed sessions, dropped groups, weights and rewards, in metrics and journal."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from support.job import AGENT, run

from seamless_verl.journal import JournalReader
from seamless_verl.journal.stored import rebuild_record
from seamless_verl.runtime.files import RunDescription
from seamless_verl.tools.trajectories.recorded import recorded
from seamless_verl.trajectory.policies import TrainAll
from seamless_verl.trajectory.sequences import assemble

pytestmark = [pytest.mark.integration, pytest.mark.slowest(1)]


def test_journal_and_metrics_tell_the_same(nano: Path, tmp_path: Path) -> None:
    """Every session has two sequences, and about one in five fails; each mini-batch has 32 sessions all the same."""
    loops = {**AGENT, "actor_rollout_ref__rollout__agent__default_agent_loop": "branching"}
    job = run(
        tmp_path,
        nano,
        **loops,
        trainer__total_training_steps=4,
        trainer__test_freq=2,
        seamless__max_staleness=1,
        actor_rollout_ref__actor__loss_agg_mode="seq-mean-token-mean",
        actor_rollout_ref__actor__ppo_mini_batch_size=4,
    )
    steps, log = job.metrics(), job.log()
    assert (described := RunDescription.read(tmp_path / "checkpoints")) is not None
    assert (described.samples, described.updates, described.max_staleness) == (4, 1, 1)
    last = steps[4]
    reader = JournalReader(tmp_path / "checkpoints" / "trajectories.sqlite")
    outcomes = Counter(re.sub(r"step .*", "trained", summary.outcome) for summary in reader.sessions())
    uids = {summary.uid for summary in reader.sessions() if summary.outcome.startswith("step ")}
    assert len(uids) == 4 * 8, "every group that was trained has its step"
    assert 2 * 32 < outcomes["trained"] < 4 * 32, "groups were trained without their failed sessions"
    assert outcomes["dropped"] > 0 and outcomes["validation"] > 0
    assert "failed and is left out" in log, "at least once for the kind"
    assert 0 < last["sessions/failed"] == last["sessions/failed/failed"] and last["tokens/dropped/agent_failed"] > 0
    assert last["calls/failed"] == 0
    assert "ConnectionError: the tool of" in log and not re.search(r"the group of prompt \S+ failed", log)
    trained = 0
    for summary in reader.sessions():
        stored = reader.read(summary.session_id)
        assert stored is not None
        if summary.outcome == "step 1":
            assert stored.rewards["reward"] >= 0, "the reward function's score is in the journal"
            assert len({call.digest for call in stored.calls}) == 2
            how = recorded(stored)
            assembly = assemble(rebuild_record(stored, all_calls=True), TrainAll(), how.version, how.limits)
            assert len(assembly.sequences) == 2
            trained += assembly.account.trained
    assert trained > 0
    assert last["tokens/dropped/validation"] > 0
    assert last["actor/grad_norm"] > 0
