"""Views for lending policies: devices by letters, and what a trainer would ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from seamless_verl.resources.lending.policy import Costs, Demand, DeviceView, LendingPolicy, LendingView, Tag, Use

TAGS = {"B": frozenset({Tag.TRAIN, Tag.ROLLOUT}), "T": frozenset({Tag.TRAIN}), "R": frozenset({Tag.ROLLOUT})}
DEMAND = Demand(ready=0, needed=4, left_in_step=16, waiting=64)
COSTS = Costs(switch_to_rollout_s=0.01, switch_to_train_s=0.01, train_s=0.4)


def devices(letters: str, *, lent: bool = False, running: int = 0) -> tuple[DeviceView, ...]:
    """B, T or R for each device; R runs 16 calls."""
    uses = {"B": Use.ROLLOUT if lent else Use.TRAIN, "T": Use.TRAIN, "R": Use.ROLLOUT}
    calls = {"B": running, "T": 0, "R": 16}
    return tuple(
        DeviceView(f"{tag}{i}", TAGS[tag], uses[tag], running=calls[tag], rate=3880.0 if calls[tag] else 0.0)
        for i, tag in enumerate(letters)
    )


def view(letters: str = "BR", *, now: float = 0.0, lent: bool = False, running: int = 0, **more: Any) -> LendingView:
    demand = {key: more.pop(key) for key in ("ready", "held", "waiting", "finished", "left_in_step") if key in more}
    base = LendingView(now, devices(letters, lent=lent, running=running), replace(DEMAND, **demand), COSTS, None)
    return replace(base, **more)


def uses(policy: LendingPolicy, shown: LendingView) -> str:
    """The decision as one letter for each device: T or R."""
    decision = policy.decide(shown)
    return "".join(decision[device.device_id].use.value[0].upper() for device in shown.devices)


def observe_group_interval(policy: LendingPolicy, seconds_per_group: float, letters: str = "BR") -> float:
    """Shows the policy groups that finish at this interval, with nothing waiting; returns the time of the last view."""
    for i in range(60):
        policy.decide(view(letters, now=i * seconds_per_group, finished=i, waiting=0, trained=1))
    return 59 * seconds_per_group
