"""A run that trains while it validates: each validation is whole, and of the step whose weights it began with."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support.job import AGENT, POOL, Job, run
from support.job_ends import leftovers, stopped

from seamless_verl.runtime.step_metrics import VALIDATED, StepMetrics, validation_reward
from seamless_verl.trainer.validation import LATER

pytestmark = [pytest.mark.integration, pytest.mark.long]
BESIDE: dict[str, Any] = {
    **AGENT,
    **POOL,
    "seamless__evaluation": "beside",
    "seamless__max_staleness": 2,
    "trainer__val_before_train": True,
    "trainer__test_freq": 2,
    "data__val_max_samples": 64,
    "actor_rollout_ref__rollout__val_kwargs__n": 4,  # so that they end after the step
}


def curve(folder: Path) -> list[int]:
    rows = StepMetrics.beside(str(folder / "checkpoints")).rows()
    return [row.step for row in rows if validation_reward(row.metrics)[0] is not None]


def test_validations_are_whole_and_of_their_steps(nano: Path, tmp_path: Path) -> None:
    """Also those that a checkpoint was saved in the middle of, with which a resumed run does not go on."""
    saves = {"trainer.save_freq": 1, "trainer.total_training_steps": 1000, "trainer.max_actor_ckpt_to_keep": 1}
    interrupted = Job(tmp_path, nano, BESIDE | saves)
    stopped(interrupted, "step:3 ", signal.SIGTERM)
    last = int((tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    (tmp_path / "metrics.jsonl").unlink()
    total = last + 5
    resumed = run(tmp_path, nano, **BESIDE, trainer__total_training_steps=total, trainer__resume_mode="auto")
    assert leftovers(resumed) == []
    steps = resumed.metrics()
    validated = [step for step in range(last + 1, total) if step % 2 == 0]
    taken = {int(metrics[VALIDATED]): step for step, metrics in steps.items() if VALIDATED in metrics}
    assert validated[-1] in taken and taken.keys() <= {*validated}, "of two of a step, the later counts here"
    assert all(step <= when <= step + 2 for step, when in taken.items())
    found = curve(tmp_path)
    assert found[0] == 0 and found[-len(validated) - 2 :] == [last, *validated, total]
    for metrics in steps.values():
        assert (VALIDATED in metrics) <= (0 <= metrics.get(LATER, 0) <= 2)
        assert (VALIDATED in metrics) <= any(name.startswith("val-core/") for name in metrics)
    final = steps[total]
    dropped = sum(value for name, value in final.items() if name.startswith("tokens/dropped/"))
    assert final["tokens/generated"] == final["tokens/trained"] + dropped
    assert final["tokens/dropped/validation"] > 0
