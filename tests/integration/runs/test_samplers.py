"""Runs with a sampler: groups are reopened, groups of different sizes are trained, and every token is accounted for."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.job import AGENT, Job, run
from support.job_ends import leftovers

from seamless_verl.journal import JournalReader
from seamless_verl.trajectory.account import DropReason

pytestmark = [pytest.mark.integration, pytest.mark.long]
DARS: dict[str, Any] = {
    "seamless__sampler__name": "dars",
    "algorithm__norm_adv_by_std_in_grpo": False,
    "seamless__max_staleness": 1,
    "actor_rollout_ref__rollout__agent__default_agent_loop": "uneven",
    "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
}


def test_hard_prompts_get_more_samples_and_every_token_is_accounted_for(nano: Path, tmp_path: Path) -> None:
    """Its data plane is killed in the midst of it; then the run is stopped, and goes on from its last checkpoint."""
    options = AGENT | DARS | {"trainer__save_freq": 1}
    first = Job(tmp_path, nano, options | {"trainer__total_training_steps": 100}).start()
    first.wait_for("step:1 ")
    (plane,) = [one for one in first.descendants() if any("DataPlane" in part for part in one.cmdline())]
    plane.send_signal(signal.SIGKILL)
    first.wait_for("step:3 ")
    assert first.stop(signal.SIGTERM) == 130 and leftovers(first) == []
    assert not re.search(r"rewarded 0\.0|the group of prompt \S+ failed", first.log()), "an agent noticed"
    assert accounted(first) and first.metrics()[3]["seamless/sampler/reopened"] > 0
    checkpoints = tmp_path / "checkpoints"
    last = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())
    saved = json.loads((checkpoints / f"global_step_{last}" / "sampler.json").read_text())
    assert saved["name"] == "dars" and saved["histories"]
    (tmp_path / "metrics.jsonl").unlink()
    resumed = {"trainer__total_training_steps": last + 3, "trainer__resume_mode": "auto"}
    job = run(tmp_path, nano, **options, **resumed)
    assert leftovers(job) == []
    steps = job.metrics()
    assert steps.keys() == {last + 1, last + 2, last + 3}
    assert accounted(job)
    end = steps[last + 3]
    assert end["seamless/sampler/reopened"] > 0 and end["seamless/sampler/trained"] >= 3 * 8
    assert end["seamless/sampler/lost"] == 0
    sizes = trained_sizes(checkpoints / "trajectories.sqlite")
    assert min(sizes) >= 2 and max(sizes) > 4, "some groups were trained with their extra samples"
    assert min(sizes) <= 4, "those of easy questions have none"


def accounted(job: Job) -> bool:
    """Whether generated = trained + dropped, and no token was too old, in each step."""
    steps = job.metrics().values()
    dropped = [sum(step[f"tokens/dropped/{reason}"] for reason in DropReason) for step in steps]
    sums = [step["tokens/generated"] - step["tokens/trained"] for step in steps]
    return sums == dropped and all(step["training/off_policy/trajectory_staleness_worst/max"] <= 1 for step in steps)


def trained_sizes(journal: Path) -> list[int]:
    """The sessions that were kept of each group that was trained, by the journal."""
    reader, sizes = JournalReader(journal), Counter[str]()
    for summary in reader.sessions():
        stored = reader.read(summary.session_id)
        assert stored is not None
        if stored.group is not None and stored.group.outcome == "trained" and stored.handed.get("kept"):
            sizes[stored.uid] += 1
    return list(sizes.values())
