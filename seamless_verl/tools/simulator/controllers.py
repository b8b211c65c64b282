"""The policies of a real run, asked in virtual time: how far to go ahead, and who is lent."""

from __future__ import annotations

from typing import NamedTuple

from seamless_verl.resources.ahead import AheadLevel, EngineUse
from seamless_verl.resources.lending.marginal import moving_average
from seamless_verl.resources.lending.policy import Costs, Demand, DeviceView, LendingPolicy, LendingView, Use
from seamless_verl.tools.simulator.cluster import VirtualCluster
from seamless_verl.tools.simulator.engine import SimulatedDevice, SimulatedGroup, SimulatedUse
from seamless_verl.tools.simulator.groups import PromptGroups
from seamless_verl.tools.simulator.scenario import Scheduler


class SimulatedLoad(NamedTuple):
    """A simulated engine at one moment, as `EngineUse` sees a real one."""

    replica_id: str
    running: int
    slots: int
    generated: float
    serves: bool


class AheadControl:
    """Looks at the cluster's engines while training waits for groups, where the scheduler finds how far to go."""

    def __init__(self, cluster: VirtualCluster, scheduler: Scheduler) -> None:
        self.cluster, self.given = cluster, scheduler.batches_ahead
        self.level = AheadLevel(scheduler.max_staleness) if scheduler.finds_ahead else None
        self.use = EngineUse()
        self.generating = [device for device in cluster.devices if device.generates]
        self.generated: dict[str, float] = {}
        self.step_began = self.looked = self.idle_s = 0.0

    @property
    def batches(self) -> float:
        """Steps' worth of prompts outstanding beyond the current step's."""
        return self.given if self.level is None else self.level.level

    def look(self) -> None:
        """While training waits for groups."""
        if self.level is None or not self.use.due(self.cluster.now):
            return
        seconds, self.looked = self.cluster.now - self.looked, self.cluster.now
        loads = []
        for device in self.cluster.devices:
            engine = device.engine
            tokens = self.generated.get(device.name, 0.0) + device.rate * seconds
            self.generated[device.name] = tokens
            loads.append(SimulatedLoad(device.name, engine.running, engine.seats, tokens, device.serving))
        self.use.look(loads, self.cluster.waiting, self.cluster.now, self.level.level)

    def step_ended(self) -> None:
        now, lost = self.cluster.now, self.use.take()
        self.cluster.count_up_to_now(self.generating)
        idle_s = sum(device.seconds[SimulatedUse.IDLE] for device in self.generating)
        if self.level is not None:
            step_s = now - self.step_began
            device_s = step_s * len(self.generating)
            self.level.step_ended(step_s, lost, (idle_s - self.idle_s) / device_s if device_s else 0.0)
        self.step_began, self.idle_s = now, idle_s


class LendingController:
    """Applies a lending policy to the cluster while the trainer does not compute.

    The policy is asked when something has changed that it may see: groups, queues, empty engines, or the trainer's own
    need, of which `changed` says so. Only the last is never put off by the scheduler's `look_s`. `due_at` is when the
    trainer needs its devices, None while groups are missing.
    """

    def __init__(
        self, cluster: VirtualCluster, groups: PromptGroups, policy: LendingPolicy, scheduler: Scheduler
    ) -> None:
        self.cluster, self.groups, self.policy, self.scheduler = cluster, groups, policy, scheduler
        self.due_at: float | None = None
        self.step, self.update, self.trained = 1, 0, 0
        self.train_s: float | None = None
        self.looks_at, self.timer_set = 0.0, False
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
        cluster = self.cluster
        if cluster.computing or cluster.syncing or not self._asks():
            return
        self.changed = cluster.changed = self.groups.changed = False
        self.looks_at = cluster.now + self.scheduler.look_s
        for device in cluster.devices:
            device.engine.count_up_to(cluster.worked)
        decision = self.policy.decide(self.view())
        for device in cluster.devices:
            assignment = decision[device.name]
            if assignment.use is not device.use and device.switching_until is None:
                carry = assignment.carry or (self.scheduler.carry and assignment.use is Use.TRAIN)
                cluster.switch(device, assignment.use, carry=carry)

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
        cluster, groups, machine, bound = self.cluster, self.groups, self.cluster.machine, self.groups.bound
        held = self.due_at is None and groups.held(self.step, self.update)
        urgent = set(groups.late_groups(self.step, self.update)) if held else set[SimulatedGroup]()
        running = sum(device.engine.running for device in cluster.devices)
        unfinished = sum(len(group.samples) for group in groups.generating)
        speed = cluster.speed()
        demand = Demand(
            ready=len(groups.ready) + len(groups.training),
            needed=bound.batch,
            left_in_step=(bound.updates - self.update) * bound.batch,
            held=held,
            waiting=cluster.waiting,
            coming=max(0, unfinished - running - cluster.waiting),
            finished=groups.finished,
        )
        return LendingView(
            now=cluster.now,
            devices=tuple(self._device(device, urgent, speed) for device in cluster.devices),
            demand=demand,
            costs=Costs(machine.switch_to_rollout_s, machine.switch_to_train_s, self.train_s or 0.0),
            due_in_s=None if self.due_at is None else max(0.0, self.due_at - cluster.now),
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
            engine.longest * self.cluster.step_s[running] / speed if running else 0.0,
            engine.seats,
        )

    def train_devices_ready(self) -> bool:
        return all(device.use is Use.TRAIN and device.switching_until is None for device in self.trains)
