"""No lending: the first mini-batch takes the train devices for good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending.policy import Deciding, alike, rollout_only
from seamless_verl.resources.lending.view import Assignment, DeviceView, LendingView, Reason, Use


class Never(Deciding):
    """Train devices generate until the first mini-batch is ready, and from that handover on never again."""

    def __init__(self) -> None:
        super().__init__()
        self._handed_over = False

    def _choose(self, view: LendingView, lendable: tuple[DeviceView, ...]) -> dict[str, Assignment]:
        if not rollout_only(view):
            raise ConfigError(
                "lending",
                "never",
                "every device that generates also trains, so that nobody would generate after the first mini-batch",
                "Tag a device rollout only, or choose marginal or step_boundary",
            )
        self._handed_over = self._handed_over or view.due_in_s is not None or view.trained > 0
        if self._handed_over:
            return alike(lendable, Use.TRAIN, Reason.NEVER)
        return alike(lendable, Use.ROLLOUT, Reason.WARMUP)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "handed_over": self._handed_over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._handed_over = bool(state["handed_over"])
