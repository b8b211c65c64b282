"""verl's `sync` on the CPU platform, and law 7: installing the plugin changes nothing in verl."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.job import VERL, Job, comparable, run
from support.paths import DATA

pytestmark = [pytest.mark.integration, pytest.mark.slowest(2), pytest.mark.usefixtures("verl_alone")]
DETERMINISTIC: dict[str, Any] = {
    "trainer__v1__trainer_mode": "sync",
    "trainer__total_training_steps": 3,
    "data__seed": 1,
    "actor_rollout_ref__rollout__agent__agent_loop_config_path": DATA / "agent_loops.yaml",
    "actor_rollout_ref__rollout__agent__default_agent_loop": "seeded",
    "actor_rollout_ref__rollout__enable_prefix_caching": False,
    "actor_rollout_ref__rollout__max_num_seqs": 1,  # a logprob's last digits depend on what is computed beside it
    "trainer__v1__sampler__custom_sampler__path": DATA / "seeded.py",
    "trainer__v1__sampler__custom_sampler__name": "CanonicalReplayBuffer",
}


@pytest.fixture(scope="module")
def plain(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Three `sync` steps with the package installed as usual, and a checkpoint after the second."""
    folder = tmp_path_factory.mktemp("plain")
    return run(folder, nano, VERL, **DETERMINISTIC, trainer__save_freq=2)


def test_the_installed_package_changes_nothing_in_verl(plain: Job, nano: Path, tmp_path: Path) -> None:
    env = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "seamless_verl.platform.plugin"}
    alone = run(tmp_path, nano, VERL, env, **DETERMINISTIC, trainer__save_freq=2)
    assert alone.metrics().keys() == plain.metrics().keys() == {1, 2, 3}
    for step, metrics in plain.metrics().items():
        assert comparable(alone.metrics()[step]) == comparable(metrics)


def test_a_resumed_sync_run_is_the_uninterrupted_one(plain: Job, nano: Path, tmp_path: Path) -> None:
    shutil.copytree(plain.folder / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    shutil.rmtree(tmp_path / "checkpoints" / "global_step_3")
    resumed = run(tmp_path, nano, VERL, **DETERMINISTIC, trainer__resume_mode="auto")
    assert resumed.metrics().keys() == {3}
    for step, metrics in resumed.metrics().items():
        assert comparable(metrics) == comparable(plain.metrics()[step])


LOSSES = ("actor/pg_loss", "actor/grad_norm", "actor/lr", "critic/score/mean", "critic/rewards/mean")


def test_without_staleness_ours_has_the_losses_of_sync_step_for_step(plain: Job, nano: Path, tmp_path: Path) -> None:
    """On the same samples; a batch is in the order in which its groups ended, so that sums differ in rounding."""
    ours = {
        name: value for name, value in DETERMINISTIC.items() if "trainer_mode" not in name and "sampler" not in name
    }
    job = run(tmp_path, nano, **ours, seamless__max_staleness=0)
    assert job.metrics().keys() == plain.metrics().keys()
    for step, expected in plain.metrics().items():
        found = job.metrics()[step]
        wanted = pytest.approx({name: expected[name] for name in LOSSES}, rel=1e-4, abs=1e-6)  # the loss is about 0
        assert {name: found[name] for name in LOSSES} == wanted
        for name in ("prompt_length/mean", "response_length/mean", "critic/score/max"):
            assert found[name] == expected[name]
