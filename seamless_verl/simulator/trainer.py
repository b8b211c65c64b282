"""Prompts between submission and training, under the staleness bound.

Invariant: submitted = trained + dropped + outstanding. A prompt is outstanding while its samples generate,
while it waits as ready, and while the trainer has it in hand.

Between the world and a lending policy: what the policy is shown, and what becomes of what it says.

The trainer's script: collect a mini-batch, prepare it, take the devices, compute; after each step, new weights.

A generator that yields what it waits for, as a condition that the simulation asks after every event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from seamless_verl.errors import IntegrityError
from seamless_verl.resources.lending import Costs, Demand, DeviceView, LendingPolicy, LendingView, Tag, Use
from seamless_verl.resources.lending.marginal import averaged
from seamless_verl.resources.staleness import StalenessBound
from seamless_verl.simulator.engine import SimulatedDevice, SimulatedGroup, SimulatedSample
from seamless_verl.simulator.records import Records
from seamless_verl.simulator.scenario import Scenario
from seamless_verl.simulator.world import World


class Groups:
    """`heed` is whether the bound holds training back, or only limits how many prompts are outstanding."""

    def __init__(self, bound: StalenessBound, *, heed: bool = True) -> None:
        self.bound, self.heed = bound, heed
        self.generating: list[SimulatedGroup] = []
        self.ready: list[SimulatedGroup] = []
        self.in_hand: list[SimulatedGroup] = []
        self.finished = self.submitted = self.trained = self.dropped = 0

    @property
    def outstanding(self) -> int:
        return len(self.generating) + len(self.ready) + len(self.in_hand)

    def submit(self, group: SimulatedGroup) -> None:
        self.generating.append(group)
        self.submitted += 1

    def finish(self, group: SimulatedGroup) -> None:
        """All its samples are done and rewarded; one that was dropped meanwhile stays dropped."""
        if group in self.generating:
            self.generating.remove(group)
            self.ready.append(group)
            self.finished += 1

    def enough(self) -> bool:
        return len(self.ready) >= self.bound.batch

    def held(self, step: int, update: int) -> bool:
        """Enough are ready, but taking them would leave one behind that could not be trained in time."""
        return self.enough() and bool(self.late(step, update))

    def late(self, step: int, update: int) -> list[SimulatedGroup]:
        """The oldest generating groups, if one would be trained too late once the oldest ready ones were taken."""
        if not self.heed or not self.generating:
            return []
        rest = self._oldest()[self.bound.batch :]
        left = [group.submitted for group in (*rest, *self.generating)]
        if self.bound.keeps(step=step, update=update, left=left):
            return []
        oldest = min(group.submitted for group in self.generating)
        return sorted((group for group in self.generating if group.submitted == oldest), key=_age)

    def take(self) -> list[SimulatedGroup]:
        """The oldest ready groups of one mini-batch."""
        self.in_hand = self._oldest()[: self.bound.batch]
        self.ready = [group for group in self.ready if group not in self.in_hand]
        return self.in_hand

    def hand_back(self) -> list[SimulatedGroup]:
        """The mini-batch in hand has been trained."""
        done, self.in_hand = self.in_hand, []
        self.trained += len(done)
        return done

    def drop(self, group: SimulatedGroup) -> None:
        self.generating.remove(group)
        self.dropped += 1

    def check_integrity(self) -> None:
        """Raises IntegrityError when a group was lost or counted twice."""
        found = self.trained + self.dropped + self.outstanding
        if found != self.submitted:
            raise IntegrityError("groups submitted = trained + dropped + outstanding", self.submitted, found)

    def _oldest(self) -> list[SimulatedGroup]:
        return sorted(self.ready, key=_age)


def _age(group: SimulatedGroup) -> tuple[int, int]:
    return group.submitted, group.number


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

    def _device(self, device: SimulatedDevice) -> DeviceView:
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

    def urgent(self) -> list[SimulatedGroup]:
        """The groups that the staleness bound waits for."""
        waits = self.due_at is None and self.groups.enough()
        return self.groups.late(self.step, self.update) if waits else []

    def train_devices_ready(self) -> bool:
        return all(device.with_trainer for device in self.world.devices if Tag.TRAIN in device.tags)

    def lent(self) -> bool:
        """Whether a device that also trains is with the rollout now."""
        return any(device.use is Use.ROLLOUT for device in self.world.devices if device.trains)


Condition = Callable[[], bool]


class Trainer:
    def __init__(self, scenario: Scenario, world: World, groups: Groups, lender: Lender, records: Records) -> None:
        self.scenario, self.world, self.groups, self.lender, self.records = scenario, world, groups, lender, records
        self.step = 0
        self.host_began: float | None = None  # when the host could begin on the mini-batch to be taken next

    def script(self) -> Iterator[Condition]:
        scheduler, prompts = self.scenario.scheduler, self.scenario.workload.prompts
        self.step = 1
        self.submit(round(scheduler.batches_ahead * prompts))
        for step in range(1, self.scenario.steps + 1):
            self.step = step
            self.lender.step = self.step
            self.submit(min(prompts, self.groups.bound.room(self.groups.outstanding)))
            for update in range(scheduler.updates):
                self.lender.update = update
                yield from self._update(update)
            yield from self._sync()
            self.records.step_ended(self.step)

    def submit(self, number: int) -> None:
        for _ in range(number):
            drawn = self.scenario.workload.group(self.scenario.seed, self.groups.submitted)
            group = SimulatedGroup.of(self.groups.submitted, self.step, drawn)
            self.groups.submit(group)
            self.world.after(self.scenario.machine.dispatch_s, lambda group=group: self._start(group))  # type: ignore[misc]

    def _start(self, group: SimulatedGroup) -> None:
        for sample in group.samples:
            self.world.enqueue(sample)

    def _update(self, update: int) -> Iterator[Condition]:
        machine = self.scenario.machine
        yield lambda: self._may_take(update)
        batch = self.groups.take()
        for group in batch:
            self.records.taken(group, self.step)
        began = self.world.now if self.host_began is None else self.host_began
        host_s, self.host_began = max(0.0, began + machine.host_s - self.world.now), None
        self.lender.due_at = self.world.now + (0 if self.scenario.scheduler.early_pause else host_s)
        yield from self._pause(host_s, wake_before=machine.switch_to_train_s)
        yield self.lender.train_devices_ready
        began = self.world.now
        devices = sum(1 for device in self.world.devices if device.trains)
        tokens = sum(group.tokens + len(group.samples) * self.scenario.workload.prompt_tokens for group in batch)
        self.world.work = machine.train_fixed_s + tokens * machine.train_token_s / devices
        yield lambda: self._computed(update)
        self.lender.trained_one(self.world.now - began)
        self.lender.due_at = None
        self.groups.hand_back()

    def _may_take(self, update: int) -> bool:
        """Whether a mini-batch can be taken; where stragglers are dropped, they are dropped for that."""
        if not self.groups.enough():
            return False
        while self.scenario.scheduler.drop and (late := self.groups.late(self.step, update)):
            self._drop(late[0])
        return not self.groups.held(self.step, update)

    def _computed(self, update: int) -> bool:
        following = (self.step, update + 1) if update + 1 < self.scenario.scheduler.updates else (self.step + 1, 0)
        if self.scenario.scheduler.prefetch and self.host_began is None:
            takeable = self.groups.enough() and not self.groups.held(*following)
            self.host_began = self.world.now if takeable else None
        return not self.world.computing

    def _drop(self, group: SimulatedGroup) -> None:
        self.groups.drop(group)
        self.world.forget(set(group.samples))
        self.records.dropped(group)
        self.submit(1)

    def _pause(self, seconds: float, *, wake_before: float = 0.0) -> Iterator[Condition]:
        """Wait; the policy is also asked `wake_before` seconds before the end."""
        end = self.world.now + seconds
        if 0 < wake_before < seconds:
            self.world.after(seconds - wake_before, lambda: None)
        self.world.after(seconds, lambda: None)
        yield lambda: self.world.now >= end - 1e-9

    def _sync(self) -> Iterator[Condition]:
        if self.scenario.scheduler.cut_at_sync:
            for device in self.world.devices:
                self.world.cut(device)
        self.world.syncing = True
        yield from self._pause(self.scenario.machine.sync_s)
        self.world.syncing = False
        self.world.commit(self.step)

    def ended(self, sample: SimulatedSample) -> None:
        """A call has ended: a tool runs, or the sample is done and perhaps its group."""
        tool_s = sample.turns[sample.turn].tool_s
        if sample.next_turn():
            self.world.after(tool_s, lambda: self._resume(sample))
            return
        sample.group.unfinished -= 1
        if not sample.group.unfinished:
            self.world.after(self.scenario.machine.collect_s, lambda: self.groups.finish(sample.group))

    def _resume(self, sample: SimulatedSample) -> None:
        if sample.group in self.groups.generating:
            self.world.enqueue(sample)
