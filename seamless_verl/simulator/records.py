"""What is measured of a simulated run, from the end of the warm-up on."""

from __future__ import annotations

from dataclasses import dataclass, field

from seamless_verl.errors import IntegrityError
from seamless_verl.simulator.engine import SimulatedDevice, SimulatedGroup, SimulatedUse
from seamless_verl.simulator.world import World

TOLERANCE = 1e-6  # of all device-seconds


@dataclass
class Records:
    """Times in seconds, tokens generated and trained in the measured steps; staleness over the whole run."""

    world: World
    warmup: int
    prompt_tokens: int
    began: float = 0.0
    base: list[dict[SimulatedUse, float]] = field(default_factory=list)
    step_ends: list[float] = field(default_factory=list)
    tokens: int = 0
    trained_tokens: int = 0
    dropped_tokens: float = 0.0
    age_tokens: float = 0.0
    max_staleness: int = 0
    max_token_age: int = 0
    held_s: float = 0.0
    measuring: bool = False

    def __post_init__(self) -> None:
        if self.warmup == 0:
            self._begin()

    def _begin(self) -> None:
        self.measuring, self.began = True, self.world.now
        self.base = [dict(device.seconds) for device in self.world.devices]

    def taken(self, group: SimulatedGroup, step: int) -> None:
        """`group` is trained in `step`, on the weights of version step - 1."""
        self.max_staleness = max(self.max_staleness, step - group.submitted)
        for sample in group.samples:
            self.max_token_age = max(self.max_token_age, step - 1 - (sample.first_version or 0))
        if self.measuring:
            self.tokens += group.tokens
            self.trained_tokens += group.tokens + len(group.samples) * self.prompt_tokens
            self.age_tokens += sum((step - 1) * s.tokens - s.version_tokens for s in group.samples)

    def dropped(self, group: SimulatedGroup) -> None:
        if self.measuring:
            self.dropped_tokens += sum(sample.generated for sample in group.samples)

    def held(self, seconds: float) -> None:
        if self.measuring:
            self.held_s += seconds

    def step_ended(self, step: int) -> None:
        if self.measuring:
            self.step_ends.append(self.world.now)
        elif step == self.warmup:
            self._begin()

    def spent(self) -> list[dict[SimulatedUse, float]]:
        """Seconds of each kind, per device, since the warm-up."""
        pairs = zip(self.world.devices, self.base, strict=True)
        return [{kind: device.seconds[kind] - base[kind] for kind in SimulatedUse} for device, base in pairs]

    def check_integrity(self) -> None:
        """Raises IntegrityError when a device's seconds do not add up to the time that passed (in microseconds)."""
        for device in self.world.devices:
            _same(device, self.world.now)


def _same(device: SimulatedDevice, now: float) -> None:
    total = sum(device.seconds.values())
    if abs(total - now) > TOLERANCE * max(1.0, now):
        raise IntegrityError(f"microseconds of device {device.name}", round(now * 1e6), round(total * 1e6))
