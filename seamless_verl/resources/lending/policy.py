"""What a lending policy is, and what all of them share: fixed devices follow their tags, reasons are counted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from seamless_verl.resources.lending.view import Assignment, Decision, DeviceView, LendingView, Reason, Tag, Use


class LendingPolicy(Protocol):
    """What the trainer and the simulator ask of a policy."""

    def decide(self, view: LendingView) -> Decision:
        """One assignment for each device of the view."""

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]:
        """All that later decisions depend on, as plain data that survives JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Deciding(ABC):
    """A policy that chooses for the lendable devices only; it counts lendings and reclaims by their reason."""

    def __init__(self) -> None:
        self._changes: Counter[str] = Counter()

    def decide(self, view: LendingView) -> Decision:
        lendable = tuple(device for device in view.devices if device.lendable)
        chosen = self._choose(view, lendable) if lendable else {}
        decision = {d.device_id: chosen.get(d.device_id) or by_tags(d) for d in view.devices}
        for device in lendable:
            self._note(view, device, decision[device.device_id])
        return {d.device_id: _carried(view, d, decision[d.device_id]) for d in view.devices}

    @abstractmethod
    def _choose(self, view: LendingView, lendable: tuple[DeviceView, ...]) -> Mapping[str, Assignment]:
        """Assignments by device id, of the devices given, which are one or more; who is left out follows its tags."""

    def _note(self, view: LendingView, device: DeviceView, said: Assignment) -> None:
        if said.use is not device.use:
            verb = "lent" if said.use is Use.ROLLOUT else "reclaimed"
            self._changes[f"{verb}/{said.reason}"] += 1

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


def _carried(view: LendingView, device: DeviceView, said: Assignment) -> Assignment:
    """Calls move where a device goes on generating, and are frozen where all train: none could take them."""
    reclaimed = device.use is Use.ROLLOUT and said.use is Use.TRAIN
    return replace(said, carry=reclaimed and bool(rollout_only(view)))


def by_tags(device: DeviceView) -> Assignment:
    """A device of one capability, or of neither, has no choice."""
    return Assignment(Use.TRAIN if Tag.TRAIN in device.tags else Use.ROLLOUT, Reason.TAGS)


def alike(lendable: tuple[DeviceView, ...], use: Use, reason: Reason) -> dict[str, Assignment]:
    """The same assignment for all."""
    return {device.device_id: Assignment(use, reason) for device in lendable}


def others_generate(view: LendingView) -> bool:
    """Whether a device that is not ours to decide about generates, or will as soon as it is given a call."""
    return any(device.running or view.demand.waiting for device in rollout_only(view))


def rollout_only(view: LendingView) -> tuple[DeviceView, ...]:
    """The devices that generate whatever is decided."""
    return tuple(d for d in view.devices if Tag.ROLLOUT in d.tags and not d.lendable)
