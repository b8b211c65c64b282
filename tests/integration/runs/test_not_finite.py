"""Numbers that are not finite in a whole run: their updates are left out, or it ends with its last checkpoint whole."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.job import Job, run
from support.paths import DATA

from seamless_verl.runtime.step_metrics import StepMetrics

pytestmark = [pytest.mark.integration, pytest.mark.long]
IN_ORDER: dict[str, Any] = {"data__shuffle": False, "seamless__max_staleness": 0, "trainer__save_freq": 1}
SKIPPED = "actor/skipped_updates_sum"


def weights_of(folder: Path, step: int) -> dict[str, Any]:
    (file,) = (folder / "checkpoints" / f"global_step_{step}" / "actor").rglob("*.safetensors")
    weights: dict[str, Any] = load_file(file)
    assert all(bool(weight.isfinite().all()) for weight in weights.values())
    return weights


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(bool((one[name] == other[name]).all()) for name in one)


def test_such_numbers_leave_their_updates_out_and_the_run_ends_well(nano: Path, tmp_path: Path) -> None:
    """Of one sample in step 3, whose loss is none; and of one group in step 5, whose advantages are none."""
    job = run(
        tmp_path,
        nano,
        **IN_ORDER,
        trainer__total_training_steps=6,
        algorithm__rollout_correction__bypass_mode=True,  # old logprobs are the rollout's
        reward__custom_reward_function__path=DATA / "not_finite.py",
        actor_rollout_ref__rollout__agent__agent_loop_config_path=DATA / "not_finite_loops.yaml",
        actor_rollout_ref__rollout__agent__default_agent_loop="not_finite",
    )
    weights = [weights_of(tmp_path, step) for step in range(1, 7)]
    moved = [not same(one, other) for one, other in pairwise(weights)]
    assert moved == [True, False, True, False, True]
    steps = StepMetrics.beside(str(tmp_path / "checkpoints")).rows()
    assert [row.number(SKIPPED) for row in steps] == [0, 0, 1, 0, 1, 0]
    third, fifth = [line for line in job.log().splitlines() if "made no optimizer step" in line]
    assert all(
        "The actor made no optimizer step, for its loss is not finite. The worst is prompt " in line
        for line in (third, fifth)
    )
    assert ", session 2, row 0: its rollout_log_probs has nan at place 0" in third
    assert ", session 0, row 0: its advantages has " in fifth


def test_three_in_a_row_end_the_run_whose_last_checkpoint_resumes(nano: Path, tmp_path: Path) -> None:
    """The checkpoints of the two before it are kept, too, and one alone would be: its weights are those of step 2."""
    options = IN_ORDER | {
        "trainer__total_training_steps": 8,
        "trainer__max_actor_ckpt_to_keep": 1,
        "algorithm__norm_adv_by_std_in_grpo": False,
        "reward__custom_reward_function__path": DATA / "not_finite.py",
        "reward__custom_reward_function__name": "overflowing",
    }
    job = Job(tmp_path, nano, options).start()
    assert job.process is not None and job.process.wait(420) == 1, job.log()[-4000:]
    assert "NotFiniteError: The actor made no optimizer step, for its gradient norm is not finite" in job.log()
    assert "That was the update number 3 in a row" in job.log()
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert [folder.name for folder in (tmp_path / "checkpoints").glob("global_step_*")] == ["global_step_4"]
    steps = StepMetrics.beside(str(tmp_path / "checkpoints")).rows()
    assert [row.number(SKIPPED) for row in steps] == [0, 0, 1, 1]
    weights = weights_of(tmp_path, 4)
    good = {"reward__custom_reward_function__name": "compute_score", "trainer__resume_mode": "auto"}
    run(tmp_path, nano, **options | good | {"trainer__total_training_steps": 6})
    assert not same(weights, weights_of(tmp_path, 6))
