"""The bubble-free bound of a workload: the time of a step were both devices busy at unit rates all the time. Pure.

    step_s >= (generated / rate + trained * update) / devices

`rate` is what one engine alone generates in a second with every seat taken, by the workload's own lengths;
`update` the device-seconds a trained token takes. Prefill, weight updates, hand-overs and helpers are left out,
so no trainer can reach it, and staleness is not asked for: with none, a batch's own tail is in the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from seamless_verl.bench.training.workloads import Workload
from seamless_verl.errors import ConfigError


@dataclass(frozen=True)
class Bound:
    """Of a mean step: its tokens, the device-seconds they take, and the least wall time on all devices."""

    generated: float
    trained: float
    generate_s: float
    update_s: float
    devices: int

    @property
    def step_s(self) -> float:
        return (self.generate_s + self.update_s) / self.devices

    @property
    def tokens_per_s(self) -> float:
        return self.generated / self.step_s


def bound(
    workload: Workload,
    *,
    steps: int,
    prompt_tokens: float,
    rates: Mapping[int, float],
    update_s_per_token: float,
    devices: int,
) -> Bound:
    """`rates` are an engine's tokens a second by samples in flight; `prompt_tokens` the mean length of a prompt.

    ConfigError when `rates` has no entry for every seat taken.
    """
    if workload.seats not in rates:
        way_out = "Measure them again"
        raise ConfigError("rates", sorted(rates), f"none is for {workload.seats} samples in flight", way_out)
    generated = workload.generated(range(steps * workload.prompts)) / steps
    trained = generated + workload.tool_tokens_of_step + prompt_tokens * workload.step_samples
    return Bound(generated, trained, generated / rates[workload.seats], trained * update_s_per_token, devices)
