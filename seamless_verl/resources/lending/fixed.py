"""Lending all or nothing, at the boundaries of steps only: the rule of verl's `hybrid_rollout.enable_switch`.

No lending: the first mini-batch takes the train devices for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending.policy import (
    Assignment,
    Deciding,
    DeviceView,
    LendingReason,
    LendingView,
    Use,
    alike,
    others_generate,
    rollout_only,
)


class StepBoundary(Deciding):
    """Lends all train devices when a step begins, and reclaims them all once `share` of its groups are ready.

    Nothing is lent inside a step, unless nobody else could generate. At least one mini-batch is waited for;
    `share=1` waits for the whole step's, as a synchronous trainer does.
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
            return alike(lendable, Use.ROLLOUT, LendingReason.BOUNDARY)
        if view.due_in_s is None and not others_generate(view):
            return alike(lendable, Use.ROLLOUT, LendingReason.NEEDED)
        return alike(lendable, Use.TRAIN, LendingReason.DUE)


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
            return alike(lendable, Use.TRAIN, LendingReason.NEVER)
        return alike(lendable, Use.ROLLOUT, LendingReason.WARMUP)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "handed_over": self._handed_over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._handed_over = bool(state["handed_over"])
