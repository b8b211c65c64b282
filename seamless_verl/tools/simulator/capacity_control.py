"""Lets the capacity of a simulated cluster change as a plan says.

Invariant: a device whose replica is dead, that has not joined, or that has left, runs no call; the calls that it had
are in the queue again.
"""

from __future__ import annotations

from collections import Counter
from random import Random

from seamless_verl.resources.lending.policy import Tag
from seamless_verl.tools.simulator.capacity import HOUR_S, CapacityChange, CapacityEvent, CapacityPlan
from seamless_verl.tools.simulator.cluster import VirtualCluster
from seamless_verl.tools.simulator.device import SimulatedDevice


class CapacityController:
    """`counts` has how often each change has happened; a death of a replica that is away already does not happen."""

    def __init__(self, cluster: VirtualCluster, plan: CapacityPlan, seed: int) -> None:
        self.cluster, self.plan, self.draw = cluster, plan, Random(f"{seed}/deaths")
        self.counts: Counter[CapacityChange] = Counter()
        cluster.on_drained = self._leave

    def begin(self) -> None:
        """Sets the plan's events as timers."""
        for number in self.plan.joining:
            device = self.cluster.devices[number]
            device.away = True
            self.cluster.update(device)
        for event in self.plan.events:
            self.cluster.after(event.at_s, lambda event=event: self._apply(event))  # type: ignore[misc]
        self._await_random_death()

    def _apply(self, event: CapacityEvent) -> None:
        device = self.cluster.devices[event.device]
        match event.change:
            case CapacityChange.DEATH:
                self.kill(device)
            case CapacityChange.JOIN:
                self.counts[CapacityChange.JOIN] += 1
                self.cluster.after(self.cluster.machine.sync_s, lambda: self._serve(device))
            case CapacityChange.DRAIN:
                self._drain(device)

    def kill(self, device: SimulatedDevice) -> None:
        """End its replica, which is back after `restart_s`, unless it was about to leave."""
        if device.away:
            return
        self.counts[CapacityChange.DEATH] += 1
        self._take_away(device)
        if not device.leaving:
            self.cluster.after(self.plan.restart_s, lambda: self._serve(device))

    def _drain(self, device: SimulatedDevice) -> None:
        self.counts[CapacityChange.DRAIN] += 1
        device.leaving = True
        self.cluster.update(device)
        if device.engine.running and self.plan.notice_s:
            self.cluster.after(self.plan.notice_s, lambda: self._leave(device))
        else:
            self._leave(device)

    def _leave(self, device: SimulatedDevice) -> None:
        if not device.away:
            self._take_away(device)

    def _take_away(self, device: SimulatedDevice) -> None:
        self.cluster.cut(device)
        device.away, self.cluster.changed = True, True
        self.cluster.update(device)

    def _serve(self, device: SimulatedDevice) -> None:
        if not device.leaving:
            device.away, self.cluster.changed = False, True
            self.cluster.update(device)

    def _await_random_death(self) -> None:
        if self.plan.deaths_per_hour:
            seconds = self.draw.expovariate(self.plan.deaths_per_hour / HOUR_S)
            self.cluster.after(seconds, self._random_death)

    def _random_death(self) -> None:
        alive = [device for device in self.cluster.devices if Tag.ROLLOUT in device.tags and not device.away]
        if alive:
            self.kill(self.draw.choice(alive))
        self._await_random_death()
