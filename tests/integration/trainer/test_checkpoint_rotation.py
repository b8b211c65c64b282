"""A run that is stopped at any moment of a save has a checkpoint to resume from, also where it keeps only one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

pytestmark = pytest.mark.integration
TRACKER = "latest_checkpointed_iteration.txt"


class Workers:
    """A group of one worker, whose checkpoints verl's own manager rotates."""

    def __init__(self) -> None:
        from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

        manager = BaseCheckpointManager.__new__(BaseCheckpointManager)  # without processes that train together
        manager.previous_saved_paths = []
        self.manager, self.engine = manager, SimpleNamespace(checkpoint_manager=manager)

    def save_checkpoint(self, path: str, *_: Any, max_ckpt_to_keep: int | None) -> None:
        from seamless_verl.trainer.checkpoints import kept_while_saving

        keep = kept_while_saving(self.engine, max_ckpt_to_keep)  # as the actor's worker does
        self.manager.ensure_checkpoint_capacity(keep)
        Path(path).mkdir(parents=True)
        self.manager.register_checkpoint(path, keep)

    def refuse_not_finite(self, *_: str) -> None: ...

    def prune_checkpoints(self, keep: int) -> None:
        from seamless_verl.trainer.checkpoints import prune

        prune(self.engine, keep)


class StoppedError(Exception):
    """In the place of a kill."""


@pytest.mark.parametrize("keep", [1, 2])
def test_a_save_that_does_not_end_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    from verl.trainer.ppo.v1 import trainer_base

    from seamless_verl.trainer.checkpoints import RunCheckpoints
    from seamless_verl.trainer.trainer import SeamlessTrainer

    trainer = SeamlessTrainer.__new__(SeamlessTrainer)
    config = {"trainer": {"default_local_dir": str(tmp_path), "max_actor_ckpt_to_keep": keep}}
    config["trainer"] |= {"max_critic_ckpt_to_keep": keep, "default_hdfs_dir": None}
    config["trainer"] |= {"resume_mode": "auto", "resume_from_path": None}
    config |= {"actor_rollout_ref": {"actor": {}}}
    trainer.config = OmegaConf.create(config)
    trainer.actor_rollout_wg, trainer.critic_wg, trainer.use_critic = Workers(), Workers(), True
    trainer.commit, trainer.trainer_mode = SimpleNamespace(wait=lambda: None), "seamless"
    trainer.checkpoints = RunCheckpoints(trainer.config, trainer._training_groups)
    trainer.train_dataloader = SimpleNamespace(state_dict=dict)
    trainer.checkpoint_callback = SimpleNamespace(on_save=lambda **_: None)
    monkeypatch.setattr(trainer, "_saved_parts", dict)
    for name in ("enter_stage", "_record_groups", "_log_what_is_known"):
        monkeypatch.setattr(trainer, name, lambda *_: None, raising=False)
    saves = []

    def save_queue(path: str, **_: Any) -> None:
        saves.append(path)
        if len(saves) == 5:
            raise StoppedError

    monkeypatch.setattr(trainer_base.tq, "save_checkpoint", save_queue)
    for step in (1, 2, 3, 4):
        trainer.global_steps = step
        trainer._save_checkpoint()
        steps = set(range(max(1, step - keep + 1), step + 1))
        assert {path.name for path in tmp_path.glob("global_step_*")} == {f"global_step_{one}" for one in steps}
    trainer.global_steps = 5
    with pytest.raises(StoppedError):
        trainer._save_checkpoint()
    assert (tmp_path / TRACKER).read_text() == "4"
    assert all((tmp_path / "global_step_4" / role).is_dir() for role in ("actor", "critic"))


def test_an_adapter_of_another_rank_is_refused_by_name(tmp_path: Path) -> None:
    from seamless_verl.errors import ConfigError
    from seamless_verl.trainer.checkpoints import refuse_other_adapter

    def model(rank: int) -> Any:
        return SimpleNamespace(lora={"rank": rank}, lora_rank=0)

    saved = tmp_path / "model/huggingface/adapter"
    saved.mkdir(parents=True)
    refuse_other_adapter(model(16), str(tmp_path))  # one without an adapter's files is verl's to refuse
    (saved / "adapter_config.json").write_text('{"r": 8}')
    refuse_other_adapter(model(8), str(tmp_path))
    refuse_other_adapter(model(16), None)
    with pytest.raises(ConfigError, match=r"model\.lora\.rank=16: is not the rank 8 of the adapter .*Set it to 8"):
        refuse_other_adapter(model(16), str(tmp_path))
