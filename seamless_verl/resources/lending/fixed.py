"""Lending policies with fixed rules: at the boundaries of steps only, or never again after the first mini-batch.

`StepBoundary` is the rule of verl's `hybrid_rollout.enable_switch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending.policy import (
    Assignment,
    BasePolicy,
    DeviceView,
    LendingReason,
    LendingView,
    Use,
    assign_all,
    fixed_devices_generate,
    rollout_only_devices,
)


class StepBoundary(BasePolicy):
    """Lends all train devices when a step begins, and reclaims them all once `share` of its groups are ready.

    Nothing is lent inside a step, unless no other device generates. It waits for at least one mini-batch; with
    `share=1` for the whole step's groups, as a synchronous trainer does.
    """

    def __init__(self, *, share: float = 1.0) -> None:
        super().__init__()
        if not 0 < share <= 1:
            raise ConfigError("share", share, "it is a share of a step's groups", "Give more than 0 and at most 1")
        self.share = share

    def _choose(self, view: LendingView, lendable: tuple[DeviceView, ...]) -> dict[str, Assignment]:
        demand = view.demand
        enough = max(demand.needed, round(self.share * demand.left_in_step))
        if view.update == 0 and (demand.ready < enough or demand.held):
            return assign_all(lendable, Use.ROLLOUT, LendingReason.BOUNDARY)
        if view.due_in_s is None and not fixed_devices_generate(view):
            return assign_all(lendable, Use.ROLLOUT, LendingReason.NEEDED)
        return assign_all(lendable, Use.TRAIN, LendingReason.DUE)


class Never(BasePolicy):
    """Train devices generate until the first mini-batch is ready, and after that only where no other replica lives."""

    def __init__(self) -> None:
        super().__init__()
        self._handed_over = False

    def _choose(self, view: LendingView, lendable: tuple[DeviceView, ...]) -> dict[str, Assignment]:
        if not rollout_only_devices(view):
            raise ConfigError(
                "lending",
                "never",
                "every device that generates also trains, so that none would generate after the first mini-batch",
                "Tag a device rollout only, or choose marginal or step_boundary",
            )
        self._handed_over = self._handed_over or view.due_in_s is not None or view.trained > 0
        if view.due_in_s is None and not any(device.seats for device in rollout_only_devices(view)):
            return assign_all(lendable, Use.ROLLOUT, LendingReason.NEEDED)
        if self._handed_over:
            return assign_all(lendable, Use.TRAIN, LendingReason.NEVER)
        return assign_all(lendable, Use.ROLLOUT, LendingReason.WARMUP)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "handed_over": self._handed_over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._handed_over = bool(state["handed_over"])
