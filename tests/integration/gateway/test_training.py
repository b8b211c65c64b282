"""An agent on the openai SDK is trained through the gateway on-policy, with every token on record."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.job import AGENT, Job, check_record, run

pytestmark = [pytest.mark.integration, pytest.mark.slowest(4)]


def test_an_openai_agent_is_trained_on_policy(nano: Path, tmp_path: Path) -> None:
    """On the trainer's own device; test_seamless.py has the disaggregated layout."""
    job: Job = run(tmp_path, nano, **AGENT, seamless__max_staleness=0, trainer__total_training_steps=4)
    steps = job.metrics()
    assert steps.keys() == {1, 2, 3, 4}
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2
        assert metrics["training/off_policy/trajectory_staleness_worst/max"] == 0
        assert metrics["calls/failed"] == metrics["calls/cancelled"] == metrics["fleet/dead"] == 0
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + metrics["tokens/dropped/too_long"] > 0
    check_record(job, sessions=4 * 8 * 4)
