"""What is said to the seamless trainer in a run of another."""

from __future__ import annotations

from enum import Enum
from operator import attrgetter

from seamless_verl.config.checks.modes import MODE_KEY, VERL_MODES
from seamless_verl.config.checks.problem import Problem
from seamless_verl.config.checks.settings import Settings, check
from seamless_verl.config.schema import SeamlessConfig

UNUSED = (
    "layout",
    "wait_for_machines_s",
    "max_staleness",
    "ahead",
    "lending",
    "handover",
    "weights.at_once",
    "weights.kv",
    "tokens.policy",
    "tokens.older_than",
    "watchdog.transition_s",
    "watchdog.no_progress_s",
)
"""Of the `seamless:` node. Machines and the gateway have checks of their own; what is left counts in every mode."""


@check
def check_unused(settings: Settings) -> list[Problem]:
    """A warning for each that is not at its default, and that verl's own trainers do not read."""
    if settings.mode not in VERL_MODES:
        return []
    given, default = settings.seamless, SeamlessConfig()
    way_out = f"Set {MODE_KEY}=seamless, or leave it out"
    return [
        Problem(f"seamless.{name}", plain(value), f"is not read by {MODE_KEY}={settings.mode}", way_out, warning=True)
        for name in UNUSED
        if (value := attrgetter(name)(given)) != attrgetter(name)(default)
    ]


def plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value
