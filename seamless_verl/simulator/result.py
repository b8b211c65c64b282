"""What a simulated run came to, and how far it stayed from a run without bubbles."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from seamless_verl.resources.lending import LendingPolicy
from seamless_verl.simulator.device import Kind
from seamless_verl.simulator.groups import Groups
from seamless_verl.simulator.records import Records
from seamless_verl.simulator.scenario import Scenario


@dataclass(frozen=True)
class Result:
    """Over the measured steps.

    `tokens_per_s` counts prompts and replies, as verl's throughput does, over all devices. `bound_step_s` is the
    step if every device computed or generated all the time, engines with every seat taken: a bound on what
    scheduling can reach. `shares` are of each device's time, by kind. `max_staleness` is in steps from
    submission to training, `max_token_age` in weight versions from a sample's first token to its training,
    `mean_token_age` the same per token. `held_share` is the time training waited for an old group only,
    `dropped_share` the part of all generated tokens that was given up.
    """

    tokens_per_s: float
    step_s: float
    longest_step_s: float
    bound_step_s: float
    idle_share: float
    held_share: float
    dropped_share: float
    max_staleness: int
    max_token_age: int
    mean_token_age: float
    lendings_per_step: float
    shares: dict[str, dict[str, float]]

    @property
    def of_bound(self) -> float:
        """The bound's step as a share of this one's; 1 is a run without bubbles."""
        return self.bound_step_s / self.step_s

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "of_bound": self.of_bound}

    @classmethod
    def of(cls, scenario: Scenario, records: Records, groups: Groups, policy: LendingPolicy) -> Result:
        steps, spent = len(records.step_ends), records.spent()
        wall = records.step_ends[-1] - records.began
        lent = sum(count for name, count in policy.metrics().items() if name.startswith("lending/lent"))
        return cls(
            tokens_per_s=records.trained_tokens / wall,
            step_s=wall / steps,
            longest_step_s=max(end - begin for begin, end in pairwise([records.began, *records.step_ends])),
            bound_step_s=bound_s(scenario, records) / steps,
            idle_share=sum(seconds[Kind.IDLE] for seconds in spent) / wall / len(spent),
            held_share=records.held_s / wall,
            dropped_share=records.dropped_tokens / (records.dropped_tokens + records.tokens),
            max_staleness=records.max_staleness,
            max_token_age=records.max_token_age,
            mean_token_age=records.age_tokens / records.tokens,
            lendings_per_step=lent / scenario.steps,
            shares={
                device.name: {kind.value: seconds[kind] / wall for kind in Kind}
                for device, seconds in zip(records.world.devices, spent, strict=True)
            },
        )


def bound_s(scenario: Scenario, records: Records) -> float:
    """Seconds the measured tokens would take with no device ever idle, at unit rates."""
    machine = scenario.machine
    best = max(machine.rate(calls) for calls in range(1, scenario.seats + 1))
    training = records.trained_tokens * machine.train_token_s
    fixed = machine.train_fixed_s * scenario.scheduler.updates * len(records.step_ends)
    return (training + records.tokens / best) / len(scenario.devices) + fixed
