"""Lending all or nothing, at the boundaries of steps only: the rule of verl's `hybrid_rollout.enable_switch`."""

from __future__ import annotations

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending.policy import Deciding, alike, others_generate
from seamless_verl.resources.lending.view import Assignment, DeviceView, LendingView, Reason, Use


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
            return alike(lendable, Use.ROLLOUT, Reason.BOUNDARY)
        if view.due_in_s is None and not others_generate(view):
            return alike(lendable, Use.ROLLOUT, Reason.NEEDED)
        return alike(lendable, Use.TRAIN, Reason.DUE)
