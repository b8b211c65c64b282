"""How a worker's checkpoints are rotated: `earlier_checkpoints` says why, this is what the trainer calls."""

from __future__ import annotations

from typing import Any

from verl.single_controller.base.decorator import Dispatch, register

from seamless_verl.trainer.earlier_checkpoints import adopt, kept_while_saving, prune


class RotatesCheckpoints:
    """To stand before a worker class of verl's that saves checkpoints."""

    def saved_engine(self) -> Any:
        """The engine whose checkpoints are rotated."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def adopt_checkpoints(self, paths: list[str]) -> None:
        """Checkpoints of earlier starts, oldest first, count for `max_actor_ckpt_to_keep`, or the critic's."""
        adopt(self.saved_engine(), paths)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        keep = kept_while_saving(self.saved_engine(), max_ckpt_to_keep)
        super().save_checkpoint(local_path, hdfs_path, global_step, keep)  # type: ignore[misc]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prune_checkpoints(self, keep: int) -> None:
        """The tracker names the last checkpoint: with it, the newest `keep` stay."""
        prune(self.saved_engine(), keep)
