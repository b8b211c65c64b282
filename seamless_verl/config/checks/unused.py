"""A check of settings that were changed and that nothing reads, in this mode and with these other settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from operator import attrgetter

from seamless_verl.config.checks.modes import MODE_KEY, VERL_MODES
from seamless_verl.config.checks.settings import Problem, Settings, check
from seamless_verl.config.gateway_settings import RequestsConfig
from seamless_verl.config.schema import SeamlessConfig
from seamless_verl.config.wait_settings import WaitsConfig

OLDER_THAN = "seamless.tokens.older_than"
BOUNDED_POLICIES = ("mask_older_than", "drop_if_older_than")  # of seamless.tokens.policy, those with `older_than`
UNUSED = (
    "layout",
    "wait_for_machines_s",
    "max_staleness",
    "ahead",
    "tail_batching",
    "min_sessions",
    "lending",
    "handover",
    "replica_restarts",
    "loop_worker_restarts",
    "weights.at_once",
    "weights.kv",
    "tokens.policy",
    "tokens.older_than",
    "tokens.weigh",
    "tokens.max_sequence",
    "tokens.grammar",
    "correction.loss",
    "correction.truncate",
    "correction.m2_threshold",
    "correction.scale_lr",
    "watchdog.transition_s",
    "watchdog.no_progress_s",
    *(f"watchdog.waits.{item.name}" for item in fields(WaitsConfig)),
    "sampler.name",
    "console",
)
"""Of the `seamless:` node, read by our trainer alone. Machines and the gateway have checks of their own."""
OF_THE_GATEWAY = (
    *("gateway.port", "gateway.journal", "gateway.journal_days", "gateway.journal_gib"),
    *("gateway.options", "gateway.public_address"),
    *(f"gateway.requests.{item.name}" for item in fields(RequestsConfig)),
    *("gateway.max_calls", "gateway.max_sessions", "gateway.max_body_mib"),
)
"""Read only where the gateway runs. `shards` and `max_failed_groups` concern all calls and all agent loops."""


@check
def check_unused(settings: Settings) -> list[Problem]:
    """A warning for each setting that was changed and that nothing reads, as other settings are."""
    given = settings.seamless
    if settings.mode in VERL_MODES:
        way_out = f"Set {MODE_KEY}=seamless, or leave it out"
        return _changed(given, UNUSED, f"is not read by {MODE_KEY}={settings.mode}", way_out)
    found: list[Problem] = []
    if given.tokens.policy not in BOUNDED_POLICIES:
        reason = f"is not read by seamless.tokens.policy={given.tokens.policy}"
        way_out = f"Set seamless.tokens.policy={' or '.join(BOUNDED_POLICIES)}, or leave it out"
        found += _changed(given, ("tokens.older_than",), reason, way_out)
    else:
        found += _masks_nothing(given)
    if not given.gateway.enabled:
        reason, way_out = "is not read while seamless.gateway.enabled=false", "Set seamless.gateway.enabled=true"
        found += _changed(given, OF_THE_GATEWAY, reason, f"{way_out}, or leave it out")
    if not given.view.enabled:
        reason, way_out = "is not read while seamless.view.enabled=false", "Set seamless.view.enabled=true"
        found += _changed(given, ("view.host", "view.port"), reason, f"{way_out}, or leave it out")
    return found


def _masks_nothing(given: SeamlessConfig) -> list[Problem]:
    """A warning where no token can be as old as those that the policy leaves out."""
    bound, policy, older = given.max_staleness, given.tokens.policy, given.tokens.older_than
    if bound is None or older < bound:
        return []
    reason = f"leaves nothing out: no token is older than seamless.max_staleness={bound}, and {OLDER_THAN}={older}"
    lower = f"Set {OLDER_THAN}={bound - 1} or less, or " if bound else "Set "
    way_out = f"{lower}seamless.max_staleness={older + 1} or more, or leave it out"
    return [Problem("seamless.tokens.policy", policy, reason, way_out, warning=True)]


def _changed(given: SeamlessConfig, names: Iterable[str], reason: str, way_out: str) -> list[Problem]:
    """A warning for each of these settings that is not its default."""
    default = SeamlessConfig()
    return [
        Problem(f"seamless.{name}", plain(value), reason, way_out, warning=True)
        for name in names
        if (value := attrgetter(name)(given)) != attrgetter(name)(default)
    ]


def plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return value.value if isinstance(value, Enum) else value
