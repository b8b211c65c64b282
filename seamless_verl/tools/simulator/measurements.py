"""Collects the measurements of a simulated run, from the end of the warm-up on."""

from __future__ import annotations

from dataclasses import dataclass, field

from seamless_verl.errors import IntegrityError
from seamless_verl.tools.simulator.cluster import VirtualCluster
from seamless_verl.tools.simulator.device import SimulatedDevice, SimulatedUse
from seamless_verl.tools.simulator.engine import SimulatedGroup

TOLERANCE = 1e-6  # of all device-seconds


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
            self.age_tokens += sum((step - 1) * s.tokens - s.version_tokens for s in group.samples)

    def record_dropped(self, group: SimulatedGroup) -> None:
        if self.measuring:
            self.dropped_tokens += sum(sample.generated for sample in group.samples)

    def record_held(self, seconds: float) -> None:
        if self.measuring:
            self.held_s += seconds

    def record_step_end(self, step: int) -> None:
        if self.measuring:
            self.step_ends.append(self.cluster.now)
        elif step == self.warmup:
            self._begin_measuring()

    def measured_seconds(self) -> list[dict[SimulatedUse, float]]:
        """Seconds of each kind, per device, since the warm-up."""
        self.cluster.count_up_to_now(self.cluster.devices)
        pairs = zip(self.cluster.devices, self.seconds_at_start, strict=True)
        return [
            {kind: device.seconds[kind] - seconds_at_start[kind] for kind in SimulatedUse}
            for device, seconds_at_start in pairs
        ]

    def check_integrity(self) -> None:
        """Raises IntegrityError when a device's seconds do not add up to the time that passed (in microseconds)."""
        self.cluster.count_up_to_now(self.cluster.devices)
        for device in self.cluster.devices:
            _check_device(device, self.cluster.now)


def _check_device(device: SimulatedDevice, now: float) -> None:
    total = sum(device.seconds.values())
    if abs(total - now) > TOLERANCE * max(1.0, now):
        raise IntegrityError(f"microseconds of device {device.name}", round(now * 1e6), round(total * 1e6))
