"""What a lending policy sees and what it says. All times in seconds, all work in tokens, calls or groups.

A *group* is the samples of one prompt; a *call* is one generation an engine runs or could run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Tag(StrEnum):
    """The two capabilities lending is about; a device may carry others."""

    TRAIN = "train"
    """the trainer computes on it"""
    ROLLOUT = "rollout"
    """an engine generates on it"""


class Use(StrEnum):
    """What a device is set up for."""

    TRAIN = "train"
    """it belongs to the trainer; its engine, if it has one, is paused"""
    ROLLOUT = "rollout"
    """its engine takes calls"""


class Reason(StrEnum):
    """Why a device is used as it is; one word each."""

    TAGS = "tags"
    """it can do nothing else"""
    DUE = "due"
    """a mini-batch waits for nothing but the devices"""
    GAIN = "gain"
    """what it would generate before it is needed is worth more than the two switches"""
    COST = "cost"
    """the two switches cost more than it would generate"""
    NEEDED = "needed"
    """training waits for groups, and nobody else generates, or the oldest are frozen on it"""
    EMPTY = "empty"
    """there is no call for it to run, nor room for a prompt"""
    RECENT = "recent"
    """it changed its use a moment ago and keeps it for the dwell time"""
    AMORTIZE = "amortize"
    """more mini-batches are collected before one switch pays for all"""
    BOUNDARY = "boundary"
    """lent when a step began, until enough of its groups are ready"""
    WARMUP = "warmup"
    """nothing has been trained yet"""
    NEVER = "never"
    """the policy lends no more"""


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device. `use` is where it is or is switching to; `running` counts calls in its engine, frozen ones too.

    `urgent` of those belong to groups that the staleness bound waits for. `rate` is what its engine produces
    now, tokens/s; `longest_s` an estimate of what its longest call still takes; `seats` how many calls it may
    run at once.
    """

    device_id: str
    tags: frozenset[str]
    use: Use
    running: int = 0
    urgent: int = 0
    rate: float = 0.0
    longest_s: float = 0.0
    seats: int = 32

    @property
    def lendable(self) -> bool:
        """Whether there is anything to decide."""
        return Tag.TRAIN in self.tags and Tag.ROLLOUT in self.tags


@dataclass(frozen=True, slots=True)
class Demand:
    """The trainer's side, in groups.

    `ready` groups are finished and untrained, `needed` make the next mini-batch, `left_in_step` are still to
    be trained in this step. `held` says that enough are ready, and that the staleness bound waits for an older
    one. `waiting` calls have no seat; `room` calls more could be submitted under the bound. `finished` counts
    all groups that ever finished.
    """

    ready: int
    needed: int
    left_in_step: int
    held: bool = False
    waiting: int = 0
    room: int = 0
    finished: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured, as moving averages: a switch each way, and the training of one mini-batch on all devices."""

    switch_to_rollout_s: float
    switch_to_train_s: float
    train_s: float


@dataclass(frozen=True, slots=True)
class LendingView:
    """One moment. `due_in_s` is when the trainer needs its devices: 0 now, None when groups are missing for that.

    `trained` counts mini-batches since the start, `update` those of the current step.
    """

    now: float
    devices: tuple[DeviceView, ...]
    demand: Demand
    costs: Costs
    due_in_s: float | None
    trained: int = 0
    update: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one device shall do, and why.

    `carry` is for a device that is reclaimed: whether its calls move to other replicas, at the price of
    computing their tokens again, or stay frozen in its engine until it is lent again.
    """

    use: Use
    reason: Reason
    carry: bool = False


Decision: TypeAlias = Mapping[str, Assignment]
"""By device id, one for each device of the view."""
