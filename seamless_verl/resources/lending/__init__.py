"""Lending policies: decide which device generates and which trains, from measurements.

A policy reads a frozen view and returns a use and a reason for each device. It changes nothing else, so that the
trainer and the simulator run the same object. To lend a device is to give it to generation; to reclaim it is to
take it back for training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending.marginal import Marginal
from seamless_verl.resources.lending.policy import (
    BasePolicy,
    Decision,
    LendingPolicy,
    LendingView,
    Never,
    StepBoundary,
)

LARGEST = 1 << 24  # bytes
POLICIES: dict[str, type[BasePolicy]] = {"marginal": Marginal, "never": Never, "step_boundary": StepBoundary}


def lending_policy(name: str) -> LendingPolicy:
    """The policy of that name with its default settings; raises ConfigError with the names there are."""
    if name not in POLICIES:
        raise ConfigError("lending", name, "there is no such lending policy", f"Choose one of {sorted(POLICIES)}")
    return POLICIES[name]()


class RecordedPolicy:
    """A policy whose views and decisions are appended to a file, a line of JSON each, by every start of a run.

    What a start appends begins with the policy's name and state. So the simulator makes the same decisions again:
    tools/simulator/calibration.py reads the file back. A file of LARGEST bytes has all that a calibration needs, and
    gets no more.
    """

    def __init__(self, policy: LendingPolicy, name: str, file: Path) -> None:
        self.policy, self.name, self.file = policy, name, file
        self._began = self._full = False

    def decide(self, view: LendingView) -> Decision:
        if not self._began:  # its state was loaded by now
            self._began = True
            self._write({"policy": self.name, "state": self.policy.state_dict()})
        decision = self.policy.decide(view)
        if self._full:
            return decision
        self._write({"view": asdict(view), "decision": {name: asdict(one) for name, one in decision.items()}})
        return decision

    def metrics(self) -> dict[str, float]:
        return self.policy.metrics()

    def state_dict(self) -> dict[str, Any]:
        return self.policy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.policy.load_state_dict(state)

    def _write(self, row: dict[str, Any]) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            self._full = file.tell() > LARGEST
            file.write(json.dumps(row, default=sorted) + "\n")
