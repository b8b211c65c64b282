"""Lending policies: the view they read, what they return, their common base, and the two with fixed rules.

A *group* is the samples of one prompt; a *call* is one generation that an engine runs or could run. All times are
in seconds, all work is in tokens, calls or groups.

Invariant: a device with one tag is always assigned by its tag; only lendable devices are decided about.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from seamless_verl.errors import ConfigError


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


class LendingReason(StrEnum):
    """Why a device is used as it is; one word each."""

    TAGS = "tags"
    """it can do nothing else"""
    DUE = "due"
    """a mini-batch is ready and needs the devices"""
    GAIN = "gain"
    """what it would generate before it is needed is worth more than the two switches"""
    COST = "cost"
    """the two switches cost more than it would generate"""
    NEEDED = "needed"
    """training waits for groups, and no other device generates, or the oldest are frozen on this one"""
    EMPTY = "empty"
    """there is no call for it to run, and none will come"""
    RECENT = "recent"
    """its use changed less than the dwell time ago"""
    AMORTIZE = "amortize"
    """it waits for more mini-batches, so that one switch serves several"""
    BOUNDARY = "boundary"
    """lent when a step began, until enough of its groups are ready"""
    WARMUP = "warmup"
    """nothing has been trained yet"""
    NEVER = "never"
    """the policy lends no more"""


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device. `use` is what it is used for or is switching to; the rest is its engine's.

    `running` counts calls, frozen ones too, and `urgent` those of groups that the staleness bound waits for. `rate` is
    what it generates now, in tokens/s; `longest_s` estimates the seconds its longest call still takes; `slots` is how
    many calls it may run at once, 0 where it has no replica now. Devices that share an `engine` are lent and reclaimed
    together, and "" is an engine of its own.
    """

    device_id: str
    tags: frozenset[str]
    use: Use
    running: int = 0
    urgent: int = 0
    rate: float = 0.0
    longest_s: float = 0.0
    slots: int = 32
    engine: str = ""

    @property
    def lendable(self) -> bool:
        """Whether a policy may decide about it."""
        return Tag.TRAIN in self.tags and Tag.ROLLOUT in self.tags


@dataclass(frozen=True, slots=True)
class Demand:
    """The trainer's side, in groups.

    `ready` groups are finished and untrained, `needed` make the next mini-batch, `left_in_step` are still to be trained
    in this step. `held`: enough are ready, but the staleness bound waits for an older one. `waiting` counts calls that
    no engine runs, and `coming` at most how many more there may soon be, of sessions without a call now. `finished`
    counts all groups that ever finished.
    """

    ready: int
    needed: int
    left_in_step: int
    held: bool = False
    waiting: int = 0
    coming: int = 0
    finished: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Moving averages of measured seconds: a switch each way, and the training of one mini-batch on all devices."""

    switch_to_rollout_s: float
    switch_to_train_s: float
    train_s: float

    @property
    def round_trip_s(self) -> float:
        return self.switch_to_rollout_s + self.switch_to_train_s


@dataclass(frozen=True, slots=True)
class LendingView:
    """One moment. `due_in_s` is in how many seconds the trainer needs its devices; None when groups are missing.

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
    """The use of one device from now on, and the reason.

    `carry` is for a device that is reclaimed: whether its calls move to other replicas, where their tokens are
    computed again, or stay frozen in its engine until it is lent again.
    """

    use: Use
    reason: LendingReason
    carry: bool = False


Decision: TypeAlias = Mapping[str, Assignment]
"""By device id, one for each device of the view."""


class LendingPolicy(Protocol):
    """The methods that the trainer and the simulator call."""

    def decide(self, view: LendingView) -> Decision:
        """One assignment for each device of the view."""

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]:
        """All that later decisions depend on, as plain data that survives JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class BasePolicy(ABC):
    """Decides about lendable devices only; counts lendings and reclaims by their reason."""

    def __init__(self) -> None:
        self._changes: Counter[str] = Counter()

    def decide(self, view: LendingView) -> Decision:
        lendable = tuple(device for device in view.devices if device.lendable)
        chosen = self._choose(view, lendable) if lendable else {}
        decision = {d.device_id: chosen.get(d.device_id) or assign_by_tags(d) for d in view.devices}
        decision |= _held_calls(view, lendable)
        for device in lendable:
            self._record_change(view, device, decision[device.device_id])
        goes_on = any(device.slots for device in rollout_only_devices(view))  # a replica is on it
        return {d.device_id: _with_carry(d, decision[d.device_id], goes_on) for d in view.devices}

    @abstractmethod
    def _choose(self, view: LendingView, lendable: tuple[DeviceView, ...]) -> Mapping[str, Assignment]:
        """Assignments by device id for the one or more `lendable` devices; one left out is assigned by its tags."""

    def _record_change(self, view: LendingView, device: DeviceView, assignment: Assignment) -> None:
        if assignment.use is not device.use:
            verb = "lent" if assignment.use is Use.ROLLOUT else "reclaimed"
            self._changes[f"{verb}/{assignment.reason}"] += 1

    def metrics(self) -> dict[str, float]:
        """How often a device was lent and reclaimed, by reason."""
        return {f"lending/{change}": float(count) for change, count in sorted(self._changes.items())}

    def state_dict(self) -> dict[str, Any]:
        return {"policy": type(self).__name__, "changes": dict(self._changes)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError on a state of another policy."""
        if state.get("policy") != type(self).__name__:
            raise ValueError(f"{type(self).__name__} was given the state of {state.get('policy')}")
        self._changes = Counter(state["changes"])


def _held_calls(view: LendingView, lendable: tuple[DeviceView, ...]) -> dict[str, Assignment]:
    """Lends what has frozen calls for which training waits: nobody else would end them."""
    if view.due_in_s is not None or not view.demand.held:
        return {}
    holding = (engine for engine in engines_of(lendable) if any(d.urgent and d.slots for d in engine))
    frozen = [device for engine in holding for device in engine if device.use is Use.TRAIN]
    return assign_all(tuple(frozen), Use.ROLLOUT, LendingReason.NEEDED)


def _with_carry(device: DeviceView, assignment: Assignment, goes_on: bool) -> Assignment:
    """Moves a reclaimed device's calls if another device generates throughout, as `goes_on` says; else they freeze."""
    carry = goes_on and device.use is Use.ROLLOUT and assignment.use is Use.TRAIN
    return assignment if assignment.carry is carry else replace(assignment, carry=carry)


def assign_by_tags(device: DeviceView) -> Assignment:
    """The only use of a device with one of the two tags, or with neither."""
    return Assignment(Use.TRAIN if Tag.TRAIN in device.tags else Use.ROLLOUT, LendingReason.TAGS)


def assign_all(lendable: tuple[DeviceView, ...], use: Use, reason: LendingReason) -> dict[str, Assignment]:
    """The same assignment for all."""
    return {device.device_id: Assignment(use, reason) for device in lendable}


def fixed_devices_generate(view: LendingView) -> bool:
    """Whether a device that is not lendable generates, or will as soon as it gets a call, which takes a replica."""
    return any(device.running or view.demand.waiting for device in rollout_only_devices(view) if device.slots)


def engines_of(devices: Iterable[DeviceView]) -> list[tuple[DeviceView, ...]]:
    """The devices by their engines."""
    found: dict[str, list[DeviceView]] = {}
    for device in devices:
        found.setdefault(device.engine or device.device_id, []).append(device)
    return [tuple(members) for members in found.values()]


def rollout_only_devices(view: LendingView) -> tuple[DeviceView, ...]:
    """The devices that generate whatever the policy decides."""
    return tuple(d for d in view.devices if Tag.ROLLOUT in d.tags and not d.lendable)


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
        if view.due_in_s is None and not any(device.slots for device in rollout_only_devices(view)):
            return assign_all(lendable, Use.ROLLOUT, LendingReason.NEEDED)
        if self._handed_over:
            return assign_all(lendable, Use.TRAIN, LendingReason.NEVER)
        return assign_all(lendable, Use.ROLLOUT, LendingReason.WARMUP)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "handed_over": self._handed_over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._handed_over = bool(state["handed_over"])
