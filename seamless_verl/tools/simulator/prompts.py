"""The simulated prompts: their pass rates, and the sampler that says how many samples each visit gets.

The data are as many prompts as the workload has pass rates, in order, and then again. A sample is right with its
prompt's pass rate, whatever was trained. The sampler is the object that the trainer runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from random import Random
from statistics import fmean

from seamless_verl.algorithms.samplers import EndedGroup, GroupVerdict, PromptSampling, make_sampler
from seamless_verl.errors import ConfigError
from seamless_verl.tools.simulator.engine import SimulatedGroup
from seamless_verl.tools.simulator.scenario import Scenario

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

    def check_integrity(self) -> None:
        if self.sampling is not None:
            self.sampling.check_integrity()

    def _offer(self, number: int) -> list[int]:
        first, self.offered = self.offered, self.offered + number
        return [i % max(1, len(self.pass_rates)) for i in range(first, first + number)]
