"""The trainer's script: collect a mini-batch, prepare it, take the devices, compute; after each step, new weights.

A generator that yields what it waits for, as a condition that the simulation asks after every event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from seamless_verl.simulator.groups import Groups
from seamless_verl.simulator.lender import Lender
from seamless_verl.simulator.records import Records
from seamless_verl.simulator.samples import Group, Sample
from seamless_verl.simulator.scenario import Scenario
from seamless_verl.simulator.world import World

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
            group = Group.of(self.groups.submitted, self.step, drawn)
            self.groups.submit(group)
            self.world.after(self.scenario.machine.dispatch_s, lambda group=group: self._start(group))  # type: ignore[misc]

    def _start(self, group: Group) -> None:
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

    def _drop(self, group: Group) -> None:
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

    def ended(self, sample: Sample) -> None:
        """A call has ended: a tool runs, or the sample is done and perhaps its group."""
        tool_s = sample.turns[sample.turn].tool_s
        if sample.next_turn():
            self.world.after(tool_s, lambda: self._resume(sample))
            return
        sample.group.unfinished -= 1
        if not sample.group.unfinished:
            self.world.after(self.scenario.machine.collect_s, lambda: self.groups.finish(sample.group))

    def _resume(self, sample: Sample) -> None:
        if sample.group in self.groups.generating:
            self.world.enqueue(sample)
