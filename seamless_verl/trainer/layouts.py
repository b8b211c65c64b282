"""Where the `seamless` trainer generates, and what a weight commit means there.

Both layouts answer the same two questions: what happens before the trainer computes, and how a
version of the weights is committed to the replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.llm_server import LLMServerManager


class RolloutPlace(ABC):
    """The replicas of one layout; they serve only committed weights. `pauses`: while the trainer computes."""

    pauses = False

    def __init__(self, servers: LLMServerManager, transfer: CheckpointEngineManager) -> None:
        self.servers, self.transfer = servers, transfer

    @abstractmethod
    def before_training(self) -> None:
        """Called when a batch has been taken and the devices of the trainer will compute."""

    @abstractmethod
    def commit(self, version: int) -> dict[str, Any]:
        """Load the trainer's weights into every replica as `version`; returns the transfer's metrics."""


class Colocated(RolloutPlace):
    """Replicas on the trainer's devices: they pause while it computes."""

    pauses = True

    def before_training(self) -> None:
        self.transfer.abort_replicas()
        self.transfer.sleep_replicas()

    def commit(self, version: int) -> dict[str, Any]:
        metrics = self.transfer.update_weights(version)
        self.transfer.resume_generation_replicas()
        return dict(metrics or {})


class Disaggregated(RolloutPlace):
    """Replicas on devices of their own: they generate while the trainer computes."""

    @classmethod
    def of(cls, servers: LLMServerManager, config: Any, actor_group: Any) -> Disaggregated:
        engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
        return cls(servers, CheckpointEngineManager(engine, actor_group, servers.get_replicas()))

    def before_training(self) -> None:
        """Nothing to do: no device is shared."""

    def commit(self, version: int) -> dict[str, Any]:
        return dict(self.transfer.update_weights(version) or {})
