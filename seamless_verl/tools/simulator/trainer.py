"""The simulated trainer: submits prompts, and takes, prepares and computes the mini-batches of a run's steps.

A mini-batch is collected, prepared by the host, and computed on the reclaimed devices; after each step new weights
are committed. `SimulatedTrainer.run_steps` is a generator that yields the condition it waits for; the simulation
checks the condition after every event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from seamless_verl.errors import IntegrityError
from seamless_verl.resources.tail_batching import TailBatching, extra_prompts
from seamless_verl.tools.simulator.cluster import VirtualCluster
from seamless_verl.tools.simulator.controllers import AheadControl, LendingController
from seamless_verl.tools.simulator.engine import SimulatedGroup, SimulatedSample, SimulatedUse
from seamless_verl.tools.simulator.groups import PromptGroups, SimulatedPrompts
from seamless_verl.tools.simulator.scenario import Scenario

TOLERANCE = 1e-6  # of all device-seconds
Condition = Callable[[], bool]


@dataclass
class Measurements:
    """Seconds, and tokens generated and trained, of the measured steps; staleness of the whole run."""

    cluster: VirtualCluster
    warmup: int
    started_at: float = 0.0
    seconds_at_start: list[dict[SimulatedUse, float]] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    tokens: int = 0
    trained_tokens: int = 0
    trained_rows: int = 0
    repeated_tokens: int = 0  # of those trained
    dropped_tokens: float = 0.0
    age_tokens: float = 0.0
    max_staleness: int = 0
    max_token_age: int = 0
    held_s: float = 0.0
    measuring: bool = False

    def __post_init__(self) -> None:
        if self.warmup == 0:
            self._begin_measuring()

    def _begin_measuring(self) -> None:
        self.measuring, self.started_at = True, self.cluster.now
        self.cluster.count_up_to_now(self.cluster.devices)
        self.seconds_at_start = [dict(device.seconds) for device in self.cluster.devices]

    def record_trained(self, group: SimulatedGroup, step: int) -> None:
        """`group` is trained in `step`, on the weights of version step - 1."""
        self.max_staleness = max(self.max_staleness, step - group.submitted)
        for sample in group.samples:
            self.max_token_age = max(self.max_token_age, step - 1 - (sample.first_version or 0))
        if self.measuring:
            self.tokens += group.tokens
            self.trained_tokens += group.trained_tokens
            self.trained_rows += len(group.samples)
            self.repeated_tokens += group.repeated_tokens
            self.age_tokens += sum((step - 1) * s.tokens - s.version_tokens for s in group.samples)

    def record_dropped(self, group: SimulatedGroup) -> None:
        if self.measuring:
            self.dropped_tokens += sum(sample.generated for sample in group.samples)

    def record_step_end(self, step: int) -> None:
        if self.measuring:
            self.step_ends.append(self.cluster.now)
        elif step == self.warmup:
            self._begin_measuring()

    def measured_seconds(self) -> list[dict[SimulatedUse, float]]:
        """Seconds of each kind, per device, since the warm-up."""
        self.cluster.count_up_to_now(self.cluster.devices)
        return [
            {kind: device.seconds[kind] - at_start[kind] for kind in SimulatedUse}
            for device, at_start in zip(self.cluster.devices, self.seconds_at_start, strict=True)
        ]

    def check_integrity(self) -> None:
        """Raises IntegrityError when a device's seconds do not add up to the time that passed (in microseconds)."""
        now = self.cluster.now
        self.cluster.count_up_to_now(self.cluster.devices)
        for device in self.cluster.devices:
            total = sum(device.seconds.values())
            if abs(total - now) > TOLERANCE * max(1.0, now):
                raise IntegrityError(f"microseconds of device {device.name}", round(now * 1e6), round(total * 1e6))


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
        ahead: AheadControl,
    ) -> None:
        self.scenario, self.cluster, self.groups, self.ahead = scenario, cluster, groups, ahead
        self.lending, self.measurements, self.prompts = lending, measurements, prompts
        self.step = self.drawn = 0
        self.tail = TailBatching(extra_prompts(scenario.scheduler.tail_batching, scenario.workload.prompts))
        self.deferred: dict[str, SimulatedGroup] = {}

    def run_steps(self) -> Iterator[Condition]:
        scheduler, prompts = self.scenario.scheduler, self.scenario.workload.prompts
        self.step = 1
        self.submit(round(self.ahead.batches * prompts))
        for step in range(1, self.scenario.steps + 1):
            self.step = step
            for update in range(scheduler.updates):
                self.lending.begin_update(step, update)
                self._submit_for(update)
                yield from self._update(update)
            yield from self._update_weights()
            self.measurements.record_step_end(self.step)
            self.ahead.step_ended()

    def _submit_for(self, update: int) -> None:
        """Submit what there is room for: before each update, or a step's prompts when it begins."""
        bound, outstanding = self.groups.bound, self.groups.outstanding
        if self.scenario.scheduler.refill and not self.tail.extra:
            self.submit(bound.room(outstanding, round(self.ahead.batches), update))
        elif update == 0 and self.tail.extra:
            self._draw()
        elif update == 0:
            self.submit(min(self.scenario.workload.prompts, bound.room(outstanding)))

    def submit(self, number: int) -> None:
        for prompt, samples in self.prompts.take(number):
            self._submit_prompt(self.drawn, prompt, samples)
            self.drawn += 1

    def _submit_prompt(self, number: int, prompt: int, samples: int) -> None:
        workload = self.scenario.workload
        group = SimulatedGroup(number, self.step, prompt=prompt, prompt_tokens=workload.prompt_tokens)
        begun = group.add(workload.group(self.scenario.seed, number, last=samples))
        self.groups.submit(group)
        self._dispatch(group, begun)

    def _draw(self) -> None:
        """Begin the step's prompts: fresh ones, or deferred ones, which have the lengths that they had before."""
        prompts, steps = self.scenario.workload.prompts, self.scenario.steps
        to_train = (steps - self.step + 1) * prompts
        draw = self.tail.decide(needed=prompts, to_train=to_train, epoch=steps * prompts)
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
        if group in self.groups.generating:  # it may be dropped or deferred already
            for sample in samples:
                self.cluster.enqueue(sample)

    def _update(self, update: int) -> Iterator[Condition]:
        machine, waits_since = self.scenario.machine, self.cluster.now
        yield lambda: self._can_take(update)
        if poll_s := self.scenario.scheduler.poll_s:
            yield from self._wait(-(self.cluster.now - waits_since) % poll_s)
        batch = self.groups.take()
        for group in batch:
            self.measurements.record_trained(group, self.step)
            self.prompts.trained(group)
        if self.tail.extra and update + 1 == self.scenario.scheduler.updates:
            self._defer_rest()
        self.lending.set_due(self.cluster.now + (0 if self.scenario.scheduler.early_pause else machine.host_s))
        yield from self._wait(machine.host_s, wake_before=machine.switch_to_train_s)
        yield self.lending.train_devices_ready
        started_at = self.cluster.now
        tokens, rows = sum(group.trained_tokens for group in batch), sum(len(group.samples) for group in batch)
        devices = len(self.lending.trains)
        seconds = machine.train_s(tokens, rows, sum(group.repeated_tokens for group in batch)) / devices
        if devices > 1:
            seconds += machine.train_sync_s / self.scenario.scheduler.updates
        self.cluster.begin_computation(seconds)
        yield lambda: not self.cluster.computing
        self.lending.record_computation(self.cluster.now - started_at)
        self.lending.set_due(None)
        self.groups.finish_training()

    def _can_take(self, update: int) -> bool:
        """Whether a mini-batch can be taken."""
        return self.groups.has_mini_batch() and not self.groups.held(self.step, update)

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
            again = partial(self._enqueue, sample.group, (sample,))
            self.cluster.after(tool_s + self.scenario.machine.call_s, again)
        else:
            self.cluster.after_helpers(lambda: self._collect(sample))

    def _collect(self, sample: SimulatedSample) -> None:
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
            self._dispatch(group, self.groups.reopen(group, drawn))
        elif verdict.drop:
            self._drop(group)
        else:
            self.groups.finish(group)
