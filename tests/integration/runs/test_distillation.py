"""A student that learns from a teacher on the tokens that it generates itself, with sessions of several sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.job import AGENT, run

pytestmark = [pytest.mark.integration, pytest.mark.long]
LOSS = "distillation__distillation_loss__"
STEPS = 8
OPTIONS: dict[str, Any] = AGENT | {
    # Its sessions branch: each has two sequences, and both are trained.
    "actor_rollout_ref__rollout__agent__default_agent_loop": "branching",
    "distillation__enabled": True,
    "distillation__nnodes": 1,
    "distillation__n_gpus_per_node": 1,
    f"{LOSS}use_task_rewards": False,
    "actor_rollout_ref__actor__optim__lr": 3e-3,
    "trainer__n_gpus_per_node": 1,
    "trainer__total_training_steps": STEPS,
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model, which is sure of its tokens: the student's begins nearly uniform."""
    from safetensors.torch import load_file, save_file

    from seamless_verl.tiny import make_model

    folder = make_model("nano", 1, tmp_path_factory.mktemp("teacher") / "model")
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"] *= 10
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("loss_mode", "as_reward"), [("forward_kl_topk", False), ("k1", True)])
def test_a_student_comes_closer_to_its_teacher(
    nano: Path, tmp_path: Path, teacher: Path, loss_mode: str, as_reward: bool
) -> None:
    """`forward_kl_topk` is a loss of the teacher's likeliest tokens, `k1` the reward of the one that was sampled."""
    more = {f"{LOSS}loss_mode": loss_mode, f"{LOSS}use_policy_gradient": as_reward, f"{LOSS}topk": 16}
    job = run(tmp_path, nano, **OPTIONS, **more, distillation__teacher_models__teacher_model__model_path=teacher)
    steps = job.metrics()
    losses = [steps[i]["actor/distillation/loss"] for i in range(1, STEPS + 1)]
    print(f"\n{loss_mode}: {losses}")  # noqa: T201
    assert all(steps[i]["actor/grad_norm"] > 0 for i in range(1, STEPS + 1))
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
