"""Lending policies: decide which device generates and which trains, from measurements.

A policy reads a frozen view and returns a use and a reason for each device. It changes nothing else, so that the
trainer and the simulator run the same object. To lend a device is to give it to generation; to reclaim it is to
take it back for training.
"""

from __future__ import annotations

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending.marginal import Marginal
from seamless_verl.resources.lending.policy import BasePolicy, LendingPolicy, Never, StepBoundary

POLICIES: dict[str, type[BasePolicy]] = {"marginal": Marginal, "never": Never, "step_boundary": StepBoundary}


def lending_policy(name: str) -> LendingPolicy:
    """The policy of that name with its default settings; raises ConfigError with the names there are."""
    if name not in POLICIES:
        raise ConfigError("lending", name, "there is no such lending policy", f"Choose one of {sorted(POLICIES)}")
    return POLICIES[name]()
