"""A simulated device: its use, the switch it may be in, its engine, and the seconds of each kind.

Invariant: the seconds of all kinds of a device add up to the time up to which they were counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from seamless_verl.resources.lending.policy import Tag, Use
from seamless_verl.tools.simulator.engine import SimulatedEngine


class SimulatedUse(StrEnum):
    """What a simulated device-second was spent on."""

    TRAIN = "train"
    """computing for the trainer"""
    ROLLOUT = "rollout"
    """generating: its engine had a running call"""
    SWITCH = "switch"
    """changing its use"""
    SYNC = "sync"
    """a weight update"""
    AWAY = "away"
    """its replica is dead, or it has not joined yet, or has left, and it does not train"""
    IDLE = "idle"
    """none of these"""


@dataclass
class SimulatedDevice:
    """`switching_until` is the end of a switch to `use`, None outside one.

    `away`: it has no replica that could generate. `leaving`: its replica takes no more calls. `rate` are the tokens/s
    of its engine now, `changes` how often what it does has changed; `kind` is counted from `counted_to` on.
    """

    name: str
    tags: frozenset[str]
    engine: SimulatedEngine
    use: Use
    switching_until: float | None = None
    away: bool = False
    leaving: bool = False
    rate: float = 0.0
    changes: int = 0
    kind: SimulatedUse = SimulatedUse.IDLE
    counted_to: float = 0.0
    seconds: dict[SimulatedUse, float] = field(default_factory=lambda: dict.fromkeys(SimulatedUse, 0.0))

    @classmethod
    def create(cls, name: str, tags: frozenset[str], seats: int) -> SimulatedDevice:
        return cls(name, tags, SimulatedEngine(seats), Use.ROLLOUT if Tag.ROLLOUT in tags else Use.TRAIN)

    @property
    def trains(self) -> bool:
        return Tag.TRAIN in self.tags

    @property
    def serving(self) -> bool:
        """Whether its engine runs calls, but for weight updates."""
        return self.use is Use.ROLLOUT and self.switching_until is None and not self.away

    @property
    def open(self) -> bool:
        """Whether its engine takes calls, but for weight updates."""
        return self.serving and not self.leaving and self.engine.running < self.engine.seats

    @property
    def with_trainer(self) -> bool:
        return self.use is Use.TRAIN and self.switching_until is None

    def count_up_to(self, now: float) -> None:
        """Count the time up to `now` under the present kind."""
        self.seconds[self.kind] += now - self.counted_to
        self.counted_to = now

    def kind_now(self, *, computing: bool, syncing: bool) -> SimulatedUse:
        if syncing and not self.away:
            return SimulatedUse.SYNC
        if self.switching_until is not None:
            return SimulatedUse.SWITCH
        if computing and self.use is Use.TRAIN:
            return SimulatedUse.TRAIN
        if self.away:
            return SimulatedUse.AWAY
        return SimulatedUse.ROLLOUT if self.serving and self.engine.running else SimulatedUse.IDLE
