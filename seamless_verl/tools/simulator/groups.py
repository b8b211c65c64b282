"""The simulated prompts: who is sampled and how often, and their groups from submission to training.

Invariant: submitted = trained + dropped + deferred + outstanding. A group is outstanding while its samples generate,
while it is ready, and while it is being trained. A deferred prompt's group ends, and the prompt is submitted again.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator
from random import Random
from statistics import fmean

from seamless_verl.algorithms.samplers import EndedGroup, GroupVerdict, PromptSampling, make_sampler
from seamless_verl.errors import ConfigError, IntegrityError
from seamless_verl.resources.ahead import StalenessBound
from seamless_verl.tools.simulator.engine import SimulatedGroup, SimulatedSample
from seamless_verl.tools.simulator.scenario import Scenario, Turns


class PromptGroups:
    """`enforce_bound` is whether the bound holds training back, or only limits how many prompts are outstanding.

    `generating` are in the order of their submission, `ready` ones oldest first.
    """

    def __init__(self, bound: StalenessBound, *, enforce_bound: bool = True) -> None:
        self.bound, self.enforce_bound = bound, enforce_bound
        self.generating: dict[SimulatedGroup, None] = {}
        self.ready: list[SimulatedGroup] = []
        self.training: list[SimulatedGroup] = []
        self.finished = self.submitted = self.trained = self.dropped = self.deferred = 0
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
        """Make a generating group ready, whose samples are all done."""
        self._changes()
        del self.generating[group]
        insort(self.ready, group, key=_age)
        self.finished += 1

    def reopen(self, group: SimulatedGroup, samples: list[Turns]) -> list[SimulatedSample]:
        """Give a generating group more samples, and return them."""
        self._changes()
        return group.add(samples)

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
            rest = self.ready[self.bound.batch :]
            left_behind = [group.submitted for group in (*rest, *self.generating)]
            kept = self.bound.keeps(step=step, update=update, left_behind=left_behind)
            oldest = next(iter(self.generating)).submitted
            late = [] if kept else [group for group in self.generating if group.submitted == oldest]
            self._late = (step, update), late
        return self._late[1]

    def take(self) -> list[SimulatedGroup]:
        """Take the oldest ready groups as a mini-batch."""
        self._changes()
        self.training, self.ready = self.ready[: self.bound.batch], self.ready[self.bound.batch :]
        return self.training

    def finish_training(self) -> None:
        """Count the mini-batch that was taken as trained."""
        self._changes()
        self.trained += len(self.training)
        self.training = []

    def drop(self, group: SimulatedGroup) -> None:
        self._changes()
        del self.generating[group]
        self.dropped += 1

    def defer_rest(self) -> list[SimulatedGroup]:
        """Remove and return the groups that were not taken, finished ones among them."""
        self._changes()
        rest = sorted([*self.ready, *self.generating], key=_age)
        self.ready, self.generating = [], {}
        self.deferred += len(rest)
        return rest

    def check_integrity(self) -> None:
        """Raises IntegrityError when a group was lost or counted twice."""
        found = self.trained + self.dropped + self.deferred + self.outstanding
        if found != self.submitted:
            raise IntegrityError("groups submitted = trained + dropped + deferred + outstanding", self.submitted, found)

    def _changes(self) -> None:
        self.changed, self._late = True, None


def _age(group: SimulatedGroup) -> tuple[int, int]:
    return group.submitted, group.number


ROUNDS = 2  # so many times through the data without a prompt that is sampled, and the simulation ends


class SimulatedPrompts:
    """Owned state: how many prompts the data have offered, the sampler's, and the sizes of groups that were trained."""

    def __init__(self, scenario: Scenario) -> None:
        self.seed, self.samples = scenario.seed, scenario.workload.samples
        self.pass_rates = scenario.workload.pass_rates
        self.offered = 0
        self.sizes: defaultdict[float, list[int]] = defaultdict(list)  # by pass rate
        self.sampling: PromptSampling | None = None
        if scenario.sampler is not None:
            sampler = make_sampler(scenario.sampler, scenario.sampler_options)
            self.sampling = PromptSampling(scenario.sampler, sampler, samples=self.samples)

    def take(self, number: int) -> Iterator[tuple[int, int]]:
        """So many prompts that are not left out: which, and how many samples each gets."""
        if self.sampling is None:
            yield from ((prompt, self.samples) for prompt in self._offer(number))
            return
        left_out = 0
        while number:
            offered = self._offer(number)
            chosen = self.sampling.choose([str(prompt) for prompt in offered])
            kept = [(prompt, samples) for prompt, samples in zip(offered, chosen, strict=True) if samples]
            number -= len(kept)
            left_out = 0 if kept else left_out + len(offered)
            if left_out > ROUNDS * len(self.pass_rates):
                raise ConfigError("pass_rates", self.pass_rates, "every prompt is left out", "Add harder ones")
            yield from kept

    def judge(self, group: SimulatedGroup) -> GroupVerdict:
        """What becomes of a group whose samples have all ended; without a sampler it is trained."""
        if self.sampling is None:
            return GroupVerdict()
        draw, rate = Random(f"{self.seed}/{group.number}/outcomes"), self.pass_rates[group.prompt]
        rewards = tuple(float(draw.random() < rate) for _ in group.samples)
        uid = str(group.number)
        return self.sampling.judge([EndedGroup(uid, str(group.prompt), rewards, len(rewards))])[uid]

    def trained(self, group: SimulatedGroup) -> None:
        if self.sampling is not None:
            self.sizes[self.pass_rates[group.prompt]].append(len(group.samples))

    def sizes_by_pass_rate(self) -> dict[str, float]:
        """The mean number of samples of a trained group, by its prompt's pass rate; empty without a sampler."""
        return {f"{rate:g}": fmean(sizes) for rate, sizes in sorted(self.sizes.items())}

    def _offer(self, number: int) -> list[int]:
        first, self.offered = self.offered, self.offered + number
        return [i % max(1, len(self.pass_rates)) for i in range(first, first + number)]
