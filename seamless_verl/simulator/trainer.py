"""The simulated trainer: prompt groups under the staleness bound, the lending policy, and the steps of a run.

A mini-batch is collected, prepared by the host, and computed on the reclaimed devices; after each step new weights
are committed. `SimulatedTrainer.run_steps` is a generator that yields the condition it waits for; the simulation
checks the condition after every event.

Invariant: submitted = trained + dropped + deferred + outstanding. A group is outstanding while its samples generate,
while it is ready, and while it is being trained. A deferred prompt's group ends, and the prompt is submitted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from seamless_verl.errors import IntegrityError
from seamless_verl.resources.lending import Costs, Demand, DeviceView, LendingPolicy, LendingView, Tag, Use
from seamless_verl.resources.lending.marginal import moving_average
from seamless_verl.resources.staleness import StalenessBound
from seamless_verl.resources.tail_batching import DrawView
from seamless_verl.simulator.cluster import VirtualCluster
from seamless_verl.simulator.engine import SimulatedDevice, SimulatedGroup, SimulatedSample
from seamless_verl.simulator.measurements import Measurements
from seamless_verl.simulator.prompts import SimulatedPrompts
from seamless_verl.simulator.scenario import Scenario


class PromptGroups:
    """`enforce_bound` is whether the bound holds training back, or only limits how many prompts are outstanding."""

    def __init__(self, bound: StalenessBound, *, enforce_bound: bool = True) -> None:
        self.bound, self.enforce_bound = bound, enforce_bound
        self.generating: list[SimulatedGroup] = []
        self.ready: list[SimulatedGroup] = []
        self.training: list[SimulatedGroup] = []
        self.finished = self.submitted = self.trained = self.dropped = self.deferred = 0

    @property
    def outstanding(self) -> int:
        return len(self.generating) + len(self.ready) + len(self.training)

    def submit(self, group: SimulatedGroup) -> None:
        self.generating.append(group)
        self.submitted += 1

    def finish(self, group: SimulatedGroup) -> None:
        """Make a group ready whose samples are all done; one that was dropped meanwhile stays dropped."""
        if group in self.generating:
            self.generating.remove(group)
            self.ready.append(group)
            self.finished += 1

    def has_mini_batch(self) -> bool:
        return len(self.ready) >= self.bound.batch

    def held(self, step: int, update: int) -> bool:
        """Whether a mini-batch is ready, but taking it would leave a group behind that is then trained too late."""
        return self.has_mini_batch() and bool(self.late_groups(step, update))

    def late_groups(self, step: int, update: int) -> list[SimulatedGroup]:
        """The oldest generating groups, if one would be trained too late after the oldest ready ones were taken."""
        if not self.enforce_bound or not self.generating:
            return []
        rest = self._oldest()[self.bound.batch :]
        left_behind = [group.submitted for group in (*rest, *self.generating)]
        if self.bound.keeps(step=step, update=update, left_behind=left_behind):
            return []
        oldest = min(group.submitted for group in self.generating)
        return sorted((group for group in self.generating if group.submitted == oldest), key=_age)

    def take(self) -> list[SimulatedGroup]:
        """Take the oldest ready groups as a mini-batch."""
        self.training = self._oldest()[: self.bound.batch]
        self.ready = [group for group in self.ready if group not in self.training]
        return self.training

    def finish_training(self) -> list[SimulatedGroup]:
        """Count the mini-batch that was taken as trained."""
        done, self.training = self.training, []
        self.trained += len(done)
        return done

    def drop(self, group: SimulatedGroup) -> None:
        self.generating.remove(group)
        self.dropped += 1

    def defer_rest(self) -> list[SimulatedGroup]:
        """Remove and return the groups that were not taken, finished ones among them."""
        rest = sorted([*self.ready, *self.generating], key=_age)
        self.ready, self.generating = [], []
        self.deferred += len(rest)
        return rest

    def check_integrity(self) -> None:
        """Raises IntegrityError when a group was lost or counted twice."""
        found = self.trained + self.dropped + self.deferred + self.outstanding
        if found != self.submitted:
            raise IntegrityError("groups submitted = trained + dropped + deferred + outstanding", self.submitted, found)

    def _oldest(self) -> list[SimulatedGroup]:
        return sorted(self.ready, key=_age)


def _age(group: SimulatedGroup) -> tuple[int, int]:
    return group.submitted, group.number


class LendingController:
    """Applies a lending policy to the cluster while the trainer does not compute.

    `carry` overrides the policy's decision about a reclaimed device's calls. `due_at` is when the trainer needs its
    devices, None while groups are missing for that.
    """

    def __init__(
        self, cluster: VirtualCluster, groups: PromptGroups, policy: LendingPolicy, *, carry: bool | None
    ) -> None:
        self.cluster, self.groups, self.policy, self.carry = cluster, groups, policy, carry
        self.due_at: float | None = None
        self.step, self.update, self.trained = 1, 0, 0
        self.train_s: float | None = None

    def record_computation(self, seconds: float) -> None:
        self.trained += 1
        self.train_s = moving_average(self.train_s, seconds)

    def apply_policy(self) -> None:
        """Begin the switches that the policy decides; a device that is switching is left alone."""
        if self.cluster.computing or self.cluster.syncing:
            return
        decision = self.policy.decide(self.view())
        for device in self.cluster.devices:
            assignment = decision[device.name]
            if assignment.use is not device.use and device.switching_until is None:
                carry = assignment.carry if self.carry is None else self.carry and assignment.use is Use.TRAIN
                self.cluster.switch(device, assignment.use, carry=carry)

    def view(self) -> LendingView:
        machine = self.cluster.machine
        return LendingView(
            now=self.cluster.now,
            devices=tuple(self._device(device) for device in self.cluster.devices),
            demand=self._demand(),
            costs=Costs(machine.switch_to_rollout_s, machine.switch_to_train_s, self.train_s or 0.0),
            due_in_s=None if self.due_at is None else max(0.0, self.due_at - self.cluster.now),
            trained=self.trained,
            update=self.update,
        )

    def _device(self, device: SimulatedDevice) -> DeviceView:
        speed, running = self.cluster.speed(), device.engine.running
        urgent = self.urgent()
        return DeviceView(
            device_id=device.name,
            tags=device.tags,
            use=device.use,
            running=running,
            urgent=sum(1 for sample in device.engine.samples if sample.group in urgent),
            rate=self.cluster.rate(device) * speed,
            longest_s=device.engine.longest * self.cluster.machine.decode_s(running) / speed if running else 0.0,
            seats=device.engine.seats,
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
        return all(device.with_trainer for device in self.cluster.devices if Tag.TRAIN in device.tags)


Condition = Callable[[], bool]


class SimulatedTrainer:
    """Submits prompts, takes mini-batches and computes them; `run_steps` yields what it waits for."""

    def __init__(
        self,
        scenario: Scenario,
        cluster: VirtualCluster,
        groups: PromptGroups,
        lending: LendingController,
        measurements: Measurements,
        prompts: SimulatedPrompts,
    ) -> None:
        self.scenario, self.cluster, self.groups = scenario, cluster, groups
        self.lending, self.measurements, self.prompts = lending, measurements, prompts
        self.step = self.drawn = 0
        self.tail = scenario.scheduler.new_tail_batching(scenario.workload.prompts)
        self.deferred: dict[str, SimulatedGroup] = {}
        self.host_began: float | None = None  # when the host could begin on the mini-batch to be taken next

    def run_steps(self) -> Iterator[Condition]:
        scheduler, prompts = self.scenario.scheduler, self.scenario.workload.prompts
        self.step = 1
        self.submit(round(scheduler.batches_ahead * prompts))
        for step in range(1, self.scenario.steps + 1):
            self.step = step
            self.lending.step = self.step
            if self.tail.extra:
                self._draw()
            else:
                self.submit(min(prompts, self.groups.bound.room(self.groups.outstanding)))
            for update in range(scheduler.updates):
                self.lending.update = update
                yield from self._update(update)
            yield from self._update_weights()
            self.measurements.record_step_end(self.step)

    def submit(self, number: int) -> None:
        for prompt, samples in self.prompts.take(number):
            self._submit_prompt(self.drawn, prompt, samples)
            self.drawn += 1

    def _submit_prompt(self, number: int, prompt: int, samples: int) -> None:
        drawn = self.scenario.workload.group(self.scenario.seed, number, last=samples)
        group = SimulatedGroup.of(number, self.step, drawn, prompt)
        self.groups.submit(group)
        self._dispatch(group, group.samples)

    def _draw(self) -> None:
        """Begin the step's prompts: fresh ones, or deferred ones, which have the lengths that they had before."""
        prompts, steps = self.scenario.workload.prompts, self.scenario.steps
        to_train = (steps - self.step + 1) * prompts
        draw = self.tail.decide(DrawView(needed=prompts, to_train=to_train, epoch=steps * prompts))
        self.tail.drew(draw.fresh)
        self.submit(draw.fresh)
        for name in draw.again:
            earlier = self.deferred.pop(name)
            self._submit_prompt(earlier.number, earlier.prompt, len(earlier.samples))

    def _defer_rest(self) -> None:
        rest = self.groups.defer_rest()
        self.cluster.drop_samples({sample for group in rest for sample in group.samples})
        later = {str(group.number): group for group in rest}
        self.tail.defer(list(later))
        self.deferred |= later
        for group in rest:
            self.measurements.record_dropped(group)

    def _dispatch(self, group: SimulatedGroup, samples: Sequence[SimulatedSample]) -> None:
        self.cluster.after(self.scenario.machine.dispatch_s, partial(self._enqueue, group, tuple(samples)))

    def _enqueue(self, group: SimulatedGroup, samples: Sequence[SimulatedSample]) -> None:
        if group in self.groups.generating:  # it may be deferred already
            for sample in samples:
                self.cluster.enqueue(sample)

    def _update(self, update: int) -> Iterator[Condition]:
        machine = self.scenario.machine
        yield lambda: self._can_take(update)
        batch = self.groups.take()
        for group in batch:
            self.measurements.record_trained(group, self.step)
            self.prompts.trained(group)
        if self.tail.extra and update + 1 == self.scenario.scheduler.updates:
            self._defer_rest()
        started_at = self.cluster.now if self.host_began is None else self.host_began
        host_s, self.host_began = max(0.0, started_at + machine.host_s - self.cluster.now), None
        self.lending.due_at = self.cluster.now + (0 if self.scenario.scheduler.early_pause else host_s)
        yield from self._wait(host_s, wake_before=machine.switch_to_train_s)
        yield self.lending.train_devices_ready
        started_at = self.cluster.now
        devices = sum(1 for device in self.cluster.devices if device.trains)
        tokens = sum(group.tokens + len(group.samples) * self.scenario.workload.prompt_tokens for group in batch)
        self.cluster.computation_s = machine.train_fixed_s + tokens * machine.train_token_s / devices
        yield lambda: self._computation_done(update)
        self.lending.record_computation(self.cluster.now - started_at)
        self.lending.due_at = None
        self.groups.finish_training()

    def _can_take(self, update: int) -> bool:
        """Whether a mini-batch can be taken; late groups are dropped for that where the scheduler drops them."""
        if not self.groups.has_mini_batch():
            return False
        while self.scenario.scheduler.drop and (late := self.groups.late_groups(self.step, update)):
            self._drop(late[0])
        return not self.groups.held(self.step, update)

    def _computation_done(self, update: int) -> bool:
        following = (self.step, update + 1) if update + 1 < self.scenario.scheduler.updates else (self.step + 1, 0)
        if self.scenario.scheduler.prefetch and self.host_began is None:
            takeable = self.groups.has_mini_batch() and not self.groups.held(*following)
            self.host_began = self.cluster.now if takeable else None
        return not self.cluster.computing

    def _drop(self, group: SimulatedGroup) -> None:
        self.groups.drop(group)
        self.cluster.drop_samples(set(group.samples))
        self.measurements.record_dropped(group)
        self.submit(1)

    def _wait(self, seconds: float, *, wake_before: float = 0.0) -> Iterator[Condition]:
        """Wait; the policy is also applied `wake_before` seconds before the end."""
        end = self.cluster.now + seconds
        if 0 < wake_before < seconds:
            self.cluster.after(seconds - wake_before, lambda: None)
        self.cluster.after(seconds, lambda: None)
        yield lambda: self.cluster.now >= end - 1e-9

    def _update_weights(self) -> Iterator[Condition]:
        if self.scenario.scheduler.cut_at_sync:
            for device in self.cluster.devices:
                self.cluster.cut(device)
        self.cluster.syncing = True
        yield from self._wait(self.scenario.machine.sync_s)
        self.cluster.syncing = False
        self.cluster.commit(self.step)

    def on_call_ended(self, sample: SimulatedSample) -> None:
        """Start the tool, or, after the last turn, finish the sample and perhaps its group."""
        tool_s = sample.turns[sample.turn].tool_s
        if sample.next_turn():
            self.cluster.after(tool_s, lambda: self._start_turn(sample))
            return
        sample.group.unfinished -= 1
        if not sample.group.unfinished:
            self.cluster.after(self.scenario.machine.collect_s, lambda: self._group_ended(sample.group))

    def _group_ended(self, group: SimulatedGroup) -> None:
        """Trains a group whose samples have all ended, gives it more samples, or drops it, as the sampler says."""
        if group not in self.groups.generating:
            return
        verdict = self.prompts.judge(group)
        if verdict.extra:
            first, workload = len(group.samples), self.scenario.workload
            drawn = workload.group(self.scenario.seed, group.number, first=first, last=first + verdict.extra)
            self._dispatch(group, group.add(drawn))
        elif verdict.drop:
            self._drop(group)
        else:
            self.groups.finish(group)

    def _start_turn(self, sample: SimulatedSample) -> None:
        if sample.group in self.groups.generating:
            self.cluster.enqueue(sample)
