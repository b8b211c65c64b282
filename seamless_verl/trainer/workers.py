"""The actor classes of the `seamless` trainer: where work on devices of its own will live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.engine_workers import TrainingWorker


class SeamlessActorWorker(DetachActorWorker):
    """Actor, rollout and reference on one device; it can also keep several versions of its weights."""


class SeamlessCriticWorker(TrainingWorker):
    """A critic whose model config may register engines, as the actor's does."""

    def __init__(self, config: Any) -> None:
        import_external_libs(config.model_config.external_lib)
        super().__init__(config)


class SeamlessWorkerGroup(RayWorkerGroup):
    """The processes of one resource pool; says when they exist, before any of them builds a model."""

    on_spawn: Callable[[dict[str, RayWorkerGroup]], None] | None = None  # set by the trainer for one set-up

    def spawn(self, prefix_set: Any) -> dict[str, RayWorkerGroup]:
        groups: dict[str, RayWorkerGroup] = super().spawn(prefix_set)
        if SeamlessWorkerGroup.on_spawn is not None:
            SeamlessWorkerGroup.on_spawn(groups)
        return groups
