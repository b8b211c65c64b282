"""What a simulated machine takes for its work: an engine's rates, training, switches, weight updates, host work."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from seamless_verl.errors import ConfigError

ONE_CORE: Mapping[int, float] = {1: 475, 2: 868, 4: 1566, 8: 2536, 16: 3880, 32: 7014, 64: 8431}
"""Tokens/s at c calls in flight: a model of 3.3M parameters, one engine on one core."""


@dataclass(frozen=True)
class MachineProfile:
    """All times are in seconds; by default the host's work does not take the devices' time.

    `rates` are tokens/s of one engine by its running calls. `train_token_s` is device-seconds of training per token,
    prompts included; `train_fixed_s` is added to every mini-batch on every device. `host_s` is the host's work on a
    mini-batch before devices compute, `dispatch_s` the time from a prompt's submission to its first token,
    `collect_s` from a group's end until it is ready. A call that was cut continues once its tokens have been computed
    again, at `prefill_token_s` each. `host_token_s` is host work per generated token that takes the devices' own
    time, spread evenly over them: the front ends beside the engines on the same cores; 0 on accelerators. `sync_s` is
    a weight update, during which no device works.
    """

    rates: Mapping[int, float] = field(default_factory=lambda: ONE_CORE)
    train_token_s: float = 2.9 / 8044
    train_fixed_s: float = 0.0
    switch_to_rollout_s: float = 0.01
    switch_to_train_s: float = 0.01
    sync_s: float = 0.1
    host_s: float = 0.04
    dispatch_s: float = 0.05
    collect_s: float = 0.02
    prefill_token_s: float = 0.05e-3
    host_token_s: float = 0.0

    def rate(self, calls: int) -> float:
        """Tokens/s of one engine, from the seconds per decoding step, interpolated linearly."""
        return calls / self.decode_s(calls) if calls else 0.0

    def decode_s(self, calls: int) -> float:
        """Seconds in which each of `calls` gets one token."""
        points = [(c, c / rate) for c, rate in sorted(self.rates.items())]
        after = bisect_left(points, (calls, 0.0))
        right = min(max(after, 1), len(points) - 1)
        (c0, s0), (c1, s1) = points[right - 1], points[right]
        return s0 + (s1 - s0) * (calls - c0) / (c1 - c0)


MACHINES: Mapping[str, MachineProfile] = {
    "devices": MachineProfile(),
    # host work and dispatch are fitted to verl's modes on two cores, not measured: they include everything that slows
    # devices beside the unit rates; the switch is a pause that keeps calls
    "two_cores": MachineProfile(host_token_s=0.22e-3, dispatch_s=0.4),
}


def machine_named(name: str) -> MachineProfile:
    """The machine of that name; raises ConfigError with the valid names."""
    if name not in MACHINES:
        raise ConfigError("machine", name, "there is no such machine", f"Choose one of {sorted(MACHINES)}")
    return MACHINES[name]
