"""A run whose engines draft: the setting arrives in the engines, and what they drafted in the metrics."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.job import POOL, run

pytestmark = [pytest.mark.integration]


def test_engines_of_a_run_draft_and_agree_with_the_trainer(nano: Path, tmp_path: Path) -> None:
    """The small model's tokens are all but random, so that few drafts are right. The run is so long that its data plane
    looks at the engines' counts, which it does every few seconds."""
    short = {"trainer__total_training_steps": 15, "data__max_response_length": 64}
    bypass = {"algorithm__rollout_correction__bypass_mode": True}
    job = run(tmp_path, nano, **short, **bypass, **POOL, seamless__drafts="suffix", seamless__max_staleness=1)
    steps = job.metrics()
    last = steps[max(steps)]
    assert last["drafts/drafted"] > last["drafts/accepted"] >= last["drafts/accepted_of_prompt"] >= 0
    assert last["drafts/saved_s"] != 0.0, "the engines' times of steps came with their gains"
    compared = [m["seamless/agreement/engine/mean"] for m in steps.values() if "seamless/agreement/engine/mean" in m]
    assert max(compared, default=0.0) < 0.01
