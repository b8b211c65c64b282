"""Runs whose engines release their memory for each computation, and generate again between the updates of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.job import AGENT, run

pytestmark = [pytest.mark.integration]


@pytest.mark.parametrize("handover", ["released", "cache_only"])
def test_released_replicas_are_lent_within_a_step_and_no_token_is_lost(
    nano: Path, tmp_path: Path, handover: str
) -> None:
    options = AGENT | {
        "seamless__handover": handover,
        "seamless__max_staleness": 1,
        "trainer__v1__seamless__parameter_sync_step": 2,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 4,
        "trainer__total_training_steps": 10,  # about one lending a step, on a busy machine one in two
    }
    job = run(tmp_path, nano, **options)
    steps = job.metrics()
    assert steps.keys() == set(range(1, 11))
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        assert metrics["calls/failed"] == metrics["calls/cancelled"] == metrics["fleet/dead"] == 0
    last = steps[10]
    assert last["lending/returned"] >= 5, "between the two updates of a step only devices of the trainer generate"
    dropped = sum(value for name, value in last.items() if name.startswith("tokens/dropped/"))
    assert last["tokens/generated"] == last["tokens/trained"] + dropped
