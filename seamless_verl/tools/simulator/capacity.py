"""How the capacity of a simulated run changes while it goes on: replicas die and come back, devices join and leave.

- A *death* ends a replica at once. Its calls continue on others. After `restart_s` it is back, with the committed
  weights. A device that also trains goes on training: only its replica is dead.
- A *join* is of a device that was not there before. It loads the committed weights, and then serves.
- A *drain* is of a device that is announced to leave: it takes no more calls, and leaves when it has none, at the
  latest after `notice_s`, when the calls that it still has move to others.

What dies at random is drawn from the run's seed: intervals are exponential, victims are uniform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending.policy import Tag

HOUR_S = 3600.0
MOST_DEATHS = HOUR_S  # an hour: one a second


class CapacityChange(StrEnum):
    """What happens to a device that generates."""

    DEATH = "death"
    """its replica dies, and comes back"""
    JOIN = "join"
    """it comes new"""
    DRAIN = "drain"
    """it finishes its calls and leaves"""


@dataclass(frozen=True, slots=True)
class CapacityEvent:
    """A change of the device with this number, `at_s` seconds after the run began."""

    at_s: float
    device: int
    change: CapacityChange

    def refused(self, reason: str, way_out: str) -> ConfigError:
        """An error that names the event as the command line has it."""
        return ConfigError(f"--{self.change}", f"{self.at_s:g}:{self.device}", reason, way_out)


@dataclass(frozen=True)
class CapacityPlan:
    """`deaths_per_hour` is of the whole cluster, beside what `events` names; times are in seconds."""

    deaths_per_hour: float = 0.0
    restart_s: float = 60.0
    notice_s: float = 120.0
    events: tuple[CapacityEvent, ...] = ()

    def __post_init__(self) -> None:
        bounds = (("deaths_per_hour", 0.0, MOST_DEATHS), ("restart_s", 0.0, HOUR_S), ("notice_s", 0.0, 24 * HOUR_S))
        for key, least, most in bounds:
            value = getattr(self, key)
            if not least <= value <= most:
                raise ConfigError(key, value, "it is out of its bounds", f"Give {least:g} to {most:g}")
        for event in self.events:
            if not (math.isfinite(event.at_s) and event.at_s >= 0):
                raise event.refused("that is no time of the run", "Give 0 seconds or more")

    def check(self, devices: Sequence[frozenset[str]]) -> None:
        """Raises ConfigError for an event that cannot happen to these devices, or when none could be left."""
        for event in self.events:
            _check_event(event, devices)
        for change in (CapacityChange.JOIN, CapacityChange.DRAIN):
            changed = [event for event in self.events if event.change is change]
            numbers = [event.device for event in changed]
            if twice := [event for event in changed if numbers.count(event.device) > 1]:
                raise twice[-1].refused(f"device {twice[-1].device} has two of these", "Leave one out")
        for number in self.joining:
            earlier = [e for e in self.events if e.device == number and e.at_s < self.joining[number]]
            if earlier:
                way_out = f"Let it happen after {self.joining[number]:g} s, when the device joins"
                raise earlier[0].refused(f"device {number} is not there yet", way_out)
        passing = {event.device for event in self.events if event.change is not CapacityChange.DEATH}
        if not any(Tag.ROLLOUT in tags and number not in passing for number, tags in enumerate(devices)):
            way_out = "Leave one device that generates without join and drain"
            raise ConfigError(
                "--join, --drain", sorted(passing), "no device that generates is there all the time", way_out
            )

    @property
    def joining(self) -> dict[int, float]:
        """The devices that are not there from the beginning, with the seconds after which they join."""
        return {event.device: event.at_s for event in self.events if event.change is CapacityChange.JOIN}


def _check_event(event: CapacityEvent, devices: Sequence[frozenset[str]]) -> None:
    if not 0 <= event.device < len(devices):
        way_out = f"Give 0 to {len(devices) - 1}"
        raise event.refused(f"there is no device {event.device}", way_out)
    tags = devices[event.device]
    if Tag.ROLLOUT not in tags:
        raise event.refused(f"device {event.device} does not generate", "Choose a device tagged rollout")
    if event.change is not CapacityChange.DEATH and Tag.TRAIN in tags:
        way_out = "Choose a device that only generates"
        raise event.refused(f"device {event.device} trains, so that it cannot {event.change}", way_out)
