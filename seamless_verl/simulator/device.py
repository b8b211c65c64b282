"""One simulated device: its use, the switch it may be in, its engine, and the seconds of each kind.

Invariant: the seconds of all kinds add up to the time that has passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from seamless_verl.resources.lending import Tag, Use
from seamless_verl.simulator.engine import Engine


class Kind(StrEnum):
    """What a device's second went into."""

    TRAIN = "train"
    """computing for the trainer"""
    ROLLOUT = "rollout"
    """generating: its engine had a running call"""
    SWITCH = "switch"
    """changing its use"""
    SYNC = "sync"
    """a weight update"""
    IDLE = "idle"
    """nothing of these"""


@dataclass
class Device:
    """`switching_until` is the end of a switch to `use`, None outside one."""

    name: str
    tags: frozenset[str]
    engine: Engine
    use: Use
    switching_until: float | None = None
    seconds: dict[Kind, float] = field(default_factory=lambda: dict.fromkeys(Kind, 0.0))

    @classmethod
    def fresh(cls, name: str, tags: frozenset[str], seats: int) -> Device:
        return cls(name, tags, Engine(seats), Use.ROLLOUT if Tag.ROLLOUT in tags else Use.TRAIN)

    @property
    def trains(self) -> bool:
        return Tag.TRAIN in self.tags

    @property
    def serving(self) -> bool:
        """Its engine takes and runs calls, weight updates apart."""
        return self.use is Use.ROLLOUT and self.switching_until is None

    @property
    def with_trainer(self) -> bool:
        return self.use is Use.TRAIN and self.switching_until is None

    def kind(self, *, computing: bool, syncing: bool) -> Kind:
        if syncing:
            return Kind.SYNC
        if self.switching_until is not None:
            return Kind.SWITCH
        if self.use is Use.TRAIN:
            return Kind.TRAIN if computing else Kind.IDLE
        return Kind.ROLLOUT if self.engine.running else Kind.IDLE
