"""Applies a lending policy to a simulated cluster: when it is asked, and what it sees."""

from __future__ import annotations

from seamless_verl.resources.lending.marginal import moving_average
from seamless_verl.resources.lending.policy import Costs, Demand, DeviceView, LendingPolicy, LendingView, Use
from seamless_verl.tools.simulator.cluster import VirtualCluster
from seamless_verl.tools.simulator.device import SimulatedDevice
from seamless_verl.tools.simulator.engine import SimulatedGroup
from seamless_verl.tools.simulator.prompt_groups import PromptGroups


class LendingController:
    """Applies a lending policy to the cluster while the trainer does not compute.

    The policy is asked when something has changed that it may see: groups, queues, empty engines, or the trainer's own
    need, of which `changed` says so. Only the last is never put off by `look_s`. `carry` overrides the policy's
    decision about a reclaimed device's calls. `due_at` is when the trainer needs its devices, None while groups are
    missing.
    """

    def __init__(
        self,
        cluster: VirtualCluster,
        groups: PromptGroups,
        policy: LendingPolicy,
        *,
        carry: bool | None,
        look_s: float = 0.0,
    ) -> None:
        self.cluster, self.groups, self.policy, self.carry = cluster, groups, policy, carry
        self.due_at: float | None = None
        self.step, self.update, self.trained = 1, 0, 0
        self.train_s: float | None = None
        self.look_s, self.looks_at, self.timer_set = look_s, 0.0, False
        self.changed = True
        self.trains = [device for device in cluster.devices if device.trains]

    def set_due(self, at: float | None) -> None:
        """The trainer needs its devices then; None: groups are missing for that."""
        self.due_at, self.changed = at, True

    def begin_update(self, step: int, update: int) -> None:
        self.step, self.update, self.changed = step, update, True

    def record_computation(self, seconds: float) -> None:
        self.trained += 1
        self.train_s = moving_average(self.train_s, seconds)

    def look(self) -> None:
        """Ask the policy at the next opportunity."""
        self.changed = True

    def apply_policy(self) -> None:
        """Begin the switches that the policy decides; a device that is switching is left alone."""
        if self.cluster.computing or self.cluster.syncing or not self._asks():
            return
        self.changed = self.cluster.changed = self.groups.changed = False
        self.looks_at = self.cluster.now + self.look_s
        self.cluster.count_engines()
        decision = self.policy.decide(self.view())
        for device in self.cluster.devices:
            assignment = decision[device.name]
            if assignment.use is not device.use and device.switching_until is None:
                carry = assignment.carry if self.carry is None else self.carry and assignment.use is Use.TRAIN
                self.cluster.switch(device, assignment.use, carry=carry)

    def _asks(self) -> bool:
        if self.changed:
            return True
        if not (self.cluster.changed or self.groups.changed):
            return False
        if self.cluster.now >= self.looks_at:
            return True
        if not self.timer_set:
            self.timer_set = True
            self.cluster.after(self.looks_at - self.cluster.now, self._look_again)
        return False

    def _look_again(self) -> None:
        """The policy may be asked from now on; if it was asked meanwhile, later."""
        self.timer_set = False

    def view(self) -> LendingView:
        machine = self.cluster.machine
        urgent, speed = set(self.urgent()), self.cluster.speed()
        return LendingView(
            now=self.cluster.now,
            devices=tuple(self._device(device, urgent, speed) for device in self.cluster.devices),
            demand=self._demand(),
            costs=Costs(machine.switch_to_rollout_s, machine.switch_to_train_s, self.train_s or 0.0),
            due_in_s=None if self.due_at is None else max(0.0, self.due_at - self.cluster.now),
            trained=self.trained,
            update=self.update,
        )

    def _device(self, device: SimulatedDevice, urgent: set[SimulatedGroup], speed: float) -> DeviceView:
        engine, running = device.engine, device.engine.running
        return DeviceView(
            device.name,
            device.tags,
            device.use,
            running,
            sum(1 for sample in engine.samples if sample.group in urgent) if urgent else 0,
            device.rate * speed,
            engine.longest * self.cluster.step_s(running) / speed if running else 0.0,
            0 if device.away or device.leaving else engine.seats,
        )

    def _demand(self) -> Demand:
        bound = self.groups.bound
        unfinished = sum(len(group.samples) for group in self.groups.generating)
        running = sum(device.engine.running for device in self.cluster.devices)
        return Demand(
            ready=len(self.groups.ready) + len(self.groups.training),
            needed=bound.batch,
            left_in_step=(bound.updates - self.update) * bound.batch,
            held=self.due_at is None and self.groups.held(self.step, self.update),
            waiting=self.cluster.waiting,
            coming=max(0, unfinished - running - self.cluster.waiting),
            finished=self.groups.finished,
        )

    def urgent(self) -> list[SimulatedGroup]:
        """The groups that the staleness bound waits for."""
        waits = self.due_at is None and self.groups.has_mini_batch()
        return self.groups.late_groups(self.step, self.update) if waits else []

    def train_devices_ready(self) -> bool:
        return all(device.with_trainer for device in self.trains)
