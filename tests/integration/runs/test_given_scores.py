"""Runs whose reward function gives every kind of value: what is no number is left out, and nothing else is lost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from support.job import AGENT, DATA, run

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_a_reward_function_may_give_anything(nano: Path, tmp_path: Path) -> None:
    """A third of its values are no numbers, in training as in validations; and every fifth agent fails."""
    job = run(
        tmp_path,
        nano,
        **AGENT | {"actor_rollout_ref__rollout__agent__default_agent_loop": "branching"},
        reward__custom_reward_function__path=DATA / "given_scores.py",
        trainer__total_training_steps=3,
        trainer__val_before_train=True,
        trainer__test_freq=1,
        trainer__validation_data_dir=tmp_path / "validations",
    )
    steps, log = job.metrics(), job.log()
    assert steps.keys() == {0, 1, 2, 3}
    assert all(math.isfinite(value) for metrics in steps.values() for value in metrics.values())
    last = steps[3]
    dropped = {name: value for name, value in last.items() if name.startswith("tokens/dropped/")}
    assert last["tokens/generated"] == last["tokens/trained"] + sum(dropped.values())
    assert dropped["tokens/dropped/reward"] > 0 and last["sessions/failed/reward"] > 0
    assert all(metrics["seamless/validation/unscored"] > 0 for metrics in steps.values())
    assert any(name.startswith("val-") and "/seen/" in name for name in last)
    assert not any(name.startswith("val-") and "/parts/" in name for name in last), "no number"
    assert any(metrics["actor/grad_norm"] > 0 for step, metrics in steps.items() if step)
    assert "it has no score. compute_score of" in log and "of the validation prompt" in log
    written = [json.loads(line) for line in (tmp_path / "validations" / "0.jsonl").read_text().splitlines()]
    assert len(written) > 0 and any(one["score"] is None for one in written), "those without are in the file"
    assert {tuple(one["parts"]) != () for one in written if one.get("parts")} == {True}
