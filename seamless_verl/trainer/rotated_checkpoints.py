"""What the trainer calls of a worker for its checkpoints: their rotation, as `earlier_checkpoints` says, and a look."""

from __future__ import annotations

from typing import Any

from verl.single_controller.base.decorator import Dispatch, register

from seamless_verl.errors import NotFiniteError
from seamless_verl.trainer.earlier_checkpoints import adopt, kept_while_saving, prune
from seamless_verl.trainer.finite_updates import has_finite_weights


class RotatesCheckpoints:
    """To stand before a worker class of verl's that saves checkpoints."""

    def saved_engine(self) -> Any:
        """The engine whose checkpoints are rotated."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def refuse_not_finite(self, what: str, way_out: str) -> None:
        """Raises NotFiniteError, on every rank, if a weight of `what` is not a finite number."""
        if not has_finite_weights(self.saved_engine()):
            raise NotFiniteError(f"{what} has weights that are not finite numbers", way_out)

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
