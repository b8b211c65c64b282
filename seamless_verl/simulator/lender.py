"""Between the world and a lending policy: what the policy is shown, and what becomes of what it says."""

from __future__ import annotations

from seamless_verl.resources.lending import Costs, Demand, DeviceView, LendingPolicy, LendingView, Tag, Use
from seamless_verl.resources.lending.rates import averaged
from seamless_verl.simulator.device import Device
from seamless_verl.simulator.groups import Groups
from seamless_verl.simulator.samples import Group
from seamless_verl.simulator.world import World


class Lender:
    """Asks the policy while the trainer does not compute, and begins the switches it wants.

    `carry` overrules what it says about a reclaimed device's calls.
    `due_at` is when the trainer needs its devices, None while it lacks groups for that.
    """

    def __init__(self, world: World, groups: Groups, policy: LendingPolicy, *, carry: bool | None) -> None:
        self.world, self.groups, self.policy, self.carry = world, groups, policy, carry
        self.due_at: float | None = None
        self.step, self.update, self.trained = 1, 0, 0
        self.train_s: float | None = None

    def trained_one(self, seconds: float) -> None:
        self.trained += 1
        self.train_s = averaged(self.train_s, seconds)

    def consult(self) -> None:
        """Ask, and switch what shall switch; a switch under way is ended first."""
        if self.world.computing or self.world.syncing:
            return
        decision = self.policy.decide(self.view())
        for device in self.world.devices:
            said = decision[device.name]
            if said.use is not device.use and device.switching_until is None:
                carry = said.carry if self.carry is None else self.carry and said.use is Use.TRAIN
                self.world.switch(device, said.use, carry=carry)

    def view(self) -> LendingView:
        machine = self.world.machine
        return LendingView(
            now=self.world.now,
            devices=tuple(self._device(device) for device in self.world.devices),
            demand=self._demand(),
            costs=Costs(machine.switch_to_rollout_s, machine.switch_to_train_s, self.train_s or 0.0),
            due_in_s=None if self.due_at is None else max(0.0, self.due_at - self.world.now),
            trained=self.trained,
            update=self.update,
        )

    def _device(self, device: Device) -> DeviceView:
        speed, running = self.world.speed(), device.engine.running
        urgent = self.urgent()
        return DeviceView(
            device_id=device.name,
            tags=device.tags,
            use=device.use,
            running=running,
            urgent=sum(1 for sample in device.engine.samples if sample.group in urgent),
            rate=self.world.rate(device) * speed,
            longest_s=device.engine.longest * self.world.machine.decode_s(running) / speed if running else 0.0,
            seats=device.engine.seats,
        )

    def _demand(self) -> Demand:
        bound = self.groups.bound
        return Demand(
            ready=len(self.groups.ready) + len(self.groups.in_hand),
            needed=bound.batch,
            left_in_step=(bound.updates - self.update) * bound.batch,
            held=self.due_at is None and self.groups.held(self.step, self.update),
            waiting=self.world.waiting,
            finished=self.groups.finished,
        )

    def urgent(self) -> list[Group]:
        """The groups that the staleness bound waits for."""
        waits = self.due_at is None and self.groups.enough()
        return self.groups.late(self.step, self.update) if waits else []

    def train_devices_ready(self) -> bool:
        return all(device.with_trainer for device in self.world.devices if Tag.TRAIN in device.tags)

    def lent(self) -> bool:
        """Whether a device that also trains is with the rollout now."""
        return any(device.use is Use.ROLLOUT for device in self.world.devices if device.trains)
