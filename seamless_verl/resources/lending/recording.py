"""Records what a lending policy saw and decided, a line of JSON each; tools/simulator/calibration.py reads it back.

A file begins with the policy's name and state; a resumed run appends, and begins with them again. So a run's decisions
can be made again by the simulator's object: the same policy, from the same state, decides the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seamless_verl.resources.lending.policy import (
    Decision,
    LendingPolicy,
    LendingView,
)


class RecordedPolicy:
    """A policy whose views and decisions are appended to a file; a later start of the run appends to it."""

    def __init__(self, policy: LendingPolicy, name: str, file: Path) -> None:
        self.policy, self.name, self.file = policy, name, file
        self._began = False

    def decide(self, view: LendingView) -> Decision:
        if not self._began:  # its state was loaded by now
            self._began = True
            self._write({"policy": self.name, "state": self.policy.state_dict()})
        decision = self.policy.decide(view)
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
            file.write(json.dumps(row, default=sorted) + "\n")
