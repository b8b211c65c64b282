"""The simulated trainer: prompt groups under the staleness bound, the lending policy, and the steps of a run.

A mini-batch is collected, prepared by the host, and computed on the reclaimed devices; after each step new weights
are committed. `SimulatedTrainer.run_steps` is a generator that yields the condition it waits for; the simulation
checks the condition after every event.

Invariant: submitted = trained + dropped + outstanding. A group is outstanding while its samples generate, while it
is ready, and while it is being trained.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator

from seamless_verl.errors import IntegrityError
from seamless_verl.resources.lending import Costs, Demand, DeviceView, LendingPolicy, LendingView, Use
from seamless_verl.resources.lending.marginal import moving_average
from seamless_verl.resources.staleness import StalenessBound
from seamless_verl.simulator.cluster import VirtualCluster
from seamless_verl.simulator.device import SimulatedDevice
from seamless_verl.simulator.engine import SimulatedGroup, SimulatedSample
from seamless_verl.simulator.measurements import Measurements
from seamless_verl.simulator.scenario import Scenario


class PromptGroups:
    """`enforce_bound` is whether the bound holds training back, or only limits how many prompts are outstanding.

    `generating` are in the order of their submission, `ready` ones oldest first.
    """

    def __init__(self, bound: StalenessBound, *, enforce_bound: bool = True) -> None:
        self.bound, self.enforce_bound = bound, enforce_bound
        self.generating: dict[SimulatedGroup, None] = {}
        self.ready: list[SimulatedGroup] = []
        self.training: list[SimulatedGroup] = []
        self.finished = self.submitted = self.trained = self.dropped = 0
        self.changed = True  # set whenever a group has changed its place
        self._late: tuple[tuple[int, int], list[SimulatedGroup]] | None = None

    @property
    def outstanding(self) -> int:
        return len(self.generating) + len(self.ready) + len(self.training)

    def submit(self, group: SimulatedGroup) -> None:
        self._changes()
        self.generating[group] = None
        self.submitted += 1

    def finish(self, group: SimulatedGroup) -> None:
        """Make a group ready whose samples are all done; one that was dropped meanwhile stays dropped."""
        if group in self.generating:
            self._changes()
            del self.generating[group]
            insort(self.ready, group, key=_age)
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
        if self._late is None or self._late[0] != (step, update):
            self._late = (step, update), self._late_groups(step, update)
        return self._late[1]

    def _late_groups(self, step: int, update: int) -> list[SimulatedGroup]:
        rest = self.ready[self.bound.batch :]
        left_behind = [group.submitted for group in (*rest, *self.generating)]
        if self.bound.keeps(step=step, update=update, left_behind=left_behind):
            return []
        oldest = next(iter(self.generating)).submitted
        return [group for group in self.generating if group.submitted == oldest]

    def take(self) -> list[SimulatedGroup]:
        """Take the oldest ready groups as a mini-batch."""
        self._changes()
        self.training, self.ready = self.ready[: self.bound.batch], self.ready[self.bound.batch :]
        return self.training

    def finish_training(self) -> list[SimulatedGroup]:
        """Count the mini-batch that was taken as trained."""
        self._changes()
        done, self.training = self.training, []
        self.trained += len(done)
        return done

    def drop(self, group: SimulatedGroup) -> None:
        self._changes()
        del self.generating[group]
        self.dropped += 1

    def check_integrity(self) -> None:
        """Raises IntegrityError when a group was lost or counted twice."""
        found = self.trained + self.dropped + self.outstanding
        if found != self.submitted:
            raise IntegrityError("groups submitted = trained + dropped + outstanding", self.submitted, found)

    def _changes(self) -> None:
        self.changed, self._late = True, None


def _age(group: SimulatedGroup) -> tuple[int, int]:
    return group.submitted, group.number


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
    ) -> None:
        self.scenario, self.cluster, self.groups = scenario, cluster, groups
        self.lending, self.measurements = lending, measurements
        self.step = 0
        self.host_began: float | None = None  # when the host could begin on the mini-batch to be taken next

    def run_steps(self) -> Iterator[Condition]:
        scheduler, prompts = self.scenario.scheduler, self.scenario.workload.prompts
        self.step = 1
        self.submit(round(scheduler.batches_ahead * prompts))
        for step in range(1, self.scenario.steps + 1):
            self.step = step
            for update in range(scheduler.updates):
                self.lending.begin_update(step, update)
                self._submit_for(update)
                yield from self._update(update)
            yield from self._update_weights()
            self.measurements.record_step_end(self.step)

    def _submit_for(self, update: int) -> None:
        """Submit what there is room for: before each update, or a step's prompts when it begins."""
        scheduler, bound = self.scenario.scheduler, self.groups.bound
        if scheduler.refill:
            ahead = round(scheduler.batches_ahead)
            self.submit(bound.room(self.groups.outstanding, ahead, update))
        elif not update:
            self.submit(min(self.scenario.workload.prompts, bound.room(self.groups.outstanding)))

    def submit(self, number: int) -> None:
        for _ in range(number):
            drawn = self.scenario.workload.group(self.scenario.seed, self.groups.submitted)
            prompt = self.scenario.workload.prompt_tokens
            group = SimulatedGroup.of(self.groups.submitted, self.step, drawn, prompt)
            self.groups.submit(group)
            self.cluster.after(self.scenario.machine.dispatch_s, lambda group=group: self._enqueue_group(group))  # type: ignore[misc]

    def _enqueue_group(self, group: SimulatedGroup) -> None:
        for sample in group.samples:
            self.cluster.enqueue(sample)

    def _update(self, update: int) -> Iterator[Condition]:
        machine, waits_since = self.scenario.machine, self.cluster.now
        yield lambda: self._can_take(update)
        if poll_s := self.scenario.scheduler.poll_s:
            yield from self._wait(-(self.cluster.now - waits_since) % poll_s)
        batch = self.groups.take()
        for group in batch:
            self.measurements.record_trained(group, self.step)
        started_at = self.cluster.now if self.host_began is None else self.host_began
        host_s, self.host_began = max(0.0, started_at + machine.host_s - self.cluster.now), None
        self.lending.set_due(self.cluster.now + (0 if self.scenario.scheduler.early_pause else host_s))
        yield from self._wait(host_s, wake_before=machine.switch_to_train_s)
        yield self.lending.train_devices_ready
        started_at = self.cluster.now
        tokens, rows = sum(group.trained_tokens for group in batch), sum(len(group.samples) for group in batch)
        devices = len(self.lending.trains)
        seconds = machine.train_fixed_s + machine.train_s(tokens, rows) / devices
        if devices > 1:
            seconds += machine.train_sync_s / self.scenario.scheduler.updates
        self.cluster.begin_computation(seconds)
        yield lambda: self._computation_done(update)
        self.lending.record_computation(self.cluster.now - started_at)
        self.lending.set_due(None)
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
            self.cluster.after(seconds - wake_before, self.lending.look)
        self.cluster.after(seconds, self.lending.look)
        yield lambda: self.cluster.now >= end - 1e-9

    def _update_weights(self) -> Iterator[Condition]:
        if self.scenario.scheduler.cut_at_sync:
            for device in self.cluster.devices:
                self.cluster.cut(device)
        machine, rolling = self.scenario.machine, self.scenario.scheduler.rolling
        self.cluster.set_syncing(not rolling)
        yield from self._wait(machine.sync_s)
        self.cluster.set_syncing(False)
        self.cluster.commit(self.step, load_s=machine.load_s if rolling else 0.0)

    def on_call_ended(self, sample: SimulatedSample) -> None:
        """Start the tool, or, after the last turn, finish the sample and perhaps its group."""
        tool_s = sample.turns[sample.turn].tool_s
        if sample.next_turn():
            self.cluster.after(tool_s + self.scenario.machine.call_s, lambda: self._start_turn(sample))
            return
        self.cluster.after_helpers(lambda: self._collect(sample))

    def _collect(self, sample: SimulatedSample) -> None:
        sample.group.unfinished -= 1
        if not sample.group.unfinished:
            self.cluster.after(self.scenario.machine.collect_s, lambda: self.groups.finish(sample.group))

    def _start_turn(self, sample: SimulatedSample) -> None:
        if sample.group in self.groups.generating:
            self.cluster.enqueue(sample)
