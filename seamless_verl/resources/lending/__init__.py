"""Lending policies: which device generates and which trains, decided from what is measured.

A policy reads a frozen view and returns, for each device, a use and the reason; it touches nothing, so
the trainer and the simulator run the very same object.
"""

from __future__ import annotations

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending.fixed import Never, StepBoundary
from seamless_verl.resources.lending.marginal import Marginal
from seamless_verl.resources.lending.policy import (
    Assignment,
    Costs,
    Decision,
    Demand,
    DeviceView,
    LendingPolicy,
    LendingReason,
    LendingView,
    Tag,
    Use,
)

__all__ = (
    "POLICIES",
    "Assignment",
    "Costs",
    "Decision",
    "Demand",
    "DeviceView",
    "LendingPolicy",
    "LendingReason",
    "LendingView",
    "Marginal",
    "Never",
    "StepBoundary",
    "Tag",
    "Use",
    "lending_policy",
)

POLICIES: dict[str, type[Never] | type[StepBoundary] | type[Marginal]] = {
    "marginal": Marginal,
    "never": Never,
    "step_boundary": StepBoundary,
}


def lending_policy(name: str) -> LendingPolicy:
    """The policy of that name with its default settings; raises ConfigError with the names there are."""
    if name not in POLICIES:
        raise ConfigError("lending", name, "there is no such lending policy", f"Choose one of {sorted(POLICIES)}")
    return POLICIES[name]()
