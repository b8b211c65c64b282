"""Checks of settings that were changed and that nothing reads, in this mode and with these other settings.

UNREAD are verl's: what its V1 trainers have lost, and what our trainer replaces. A contract test has the files of verl
that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from seamless_verl.config.planning import HANDOVER, choose_handover
from seamless_verl.config.roles import has_hybrid_rollout, seamless_layout
from seamless_verl.config.schema import GatewayConfig, SeamlessConfig
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.config.verl_keys import MODE_KEY, VERL_MODES
from seamless_verl.errors import ConfigError
from seamless_verl.resources.tags import KEY as RESOURCES
from seamless_verl.resources.tags import Layout

IN_EVERY_MODE = (
    *("cpu.devices", "device_memory_gb", "host_memory_gb", "resources", "gateway.enabled", "view"),
    *("sampler.success", "sampler.threshold"),
)
"""What verl's own modes read; what they refuse; and what check_sampler warns of. Our trainer alone reads the others."""
OF_THE_GATEWAY = (
    *(f"gateway.{item.name}" for item in fields(GatewayConfig) if item.name not in ("enabled", "shards")),
    "tokens.grammar",
)
"""Read only where the gateway runs. `shards` and `max_failed_groups` concern all calls and all agent loops."""


class Unread(NamedTuple):
    """A key of verl's; `quiet` are its values that ask for nothing, of which the first is the default."""

    key: str
    quiet: tuple[object, ...]
    reason: str
    way_out: str
    by_ours: bool = False  # only our trainer does not read it


BY_V1, BY_OURS = "is not read by verl's V1 trainers", "is not read by the seamless trainer"
SAMPLED = "trainer.v1.sampler.max_off_policy"
TRUNCATED = "is not read by verl 0.9.1, which cuts off the beginning of a prompt that is too long"
REUSED = "Leave it out; skip.rollout_tq.enable=True reads the generations of an earlier run"
UNREAD = (
    Unread(
        "data.truncation",
        ("error", "left", None),  # verl's default, and what it always does (agent_loop.py `_cap_text_prompt_length`)
        TRUNCATED,
        "Leave it out; data.filter_overlong_prompts=True leaves such prompts out",
    ),
    Unread("data.sampler", (None,), BY_V1, "Leave it out; data.shuffle=False keeps the order of the file"),
    Unread("trainer.balance_batch", (True, None), f"{BY_V1}, which always balance a batch", "Leave it out"),
    Unread("trainer.esi_redundant_time", (0, None), BY_V1, "Leave it out; trainer.save_freq saves often enough"),
    Unread("skip.rollout.enable", (False, None), BY_OURS, REUSED, by_ours=True),
    Unread("skip.async_rollout.enable", (False, None), BY_OURS, REUSED, by_ours=True),
    Unread(
        "actor_rollout_ref.rollout.router_config_path",
        (None,),
        f"{BY_OURS}, which routes calls by its own rules",
        "Leave it out (docs/architecture.md)",
        by_ours=True,
    ),
    Unread(f"{SAMPLED}_threshold", (8, None), BY_OURS, "Set seamless.max_staleness instead", by_ours=True),
    Unread(f"{SAMPLED}_strategy", ("drop", None), BY_OURS, "Set seamless.max_staleness instead", by_ours=True),
)


@check
def check_unread(settings: Settings) -> list[Problem]:
    """A warning for each setting of verl's that was changed and that its V1 trainers, or ours, do not read."""
    if not settings.flag("trainer.use_v1", True):
        return []
    given = [(one, settings.get(one.key)) for one in UNREAD if settings.mode == "seamless" or not one.by_ours]
    found = [
        Problem(one.key, plain_tree(value), one.reason, one.way_out, warning=True)
        for one, value in given
        if value not in one.quiet
    ]
    return [*found, *_of_the_data_set(settings)]


def _of_the_data_set(settings: Settings) -> list[Problem]:
    """A data set of the user's that is to be told of each batch, as verl's V0 trainer does."""
    key = "data.custom_cls.path"
    path = settings.get(key)
    if not isinstance(path, str) or not (file := Path(path)).is_file():
        return []
    if b"def on_batch_end(" not in file.read_bytes():
        return []
    reason = "its on_batch_end is not called by verl's V1 trainers"
    return [Problem(key, path, reason, "Leave it out, or choose prompts by seamless.sampler.name", warning=True)]


@check
def check_unused(settings: Settings) -> list[Problem]:
    """A warning for each setting that was changed and that nothing reads, as other settings are."""
    given = settings.seamless
    found: list[Problem] = []
    if settings.host.accelerator:
        found += _changed(given, ("cpu.devices",), "is not read where there is an accelerator", "Leave it out")
    if settings.mode in VERL_MODES:
        names = [name for name in names_of(given) if name not in IN_EVERY_MODE]
        way_out = f"Set {MODE_KEY}=seamless, or leave it out"
        return found + _changed(given, names, f"is not read by {MODE_KEY}={settings.mode}", way_out)
    found += _masks_nothing(given)
    if not given.gateway.enabled:
        reason, way_out = "is not read while seamless.gateway.enabled=false", "Set seamless.gateway.enabled=true"
        found += _changed(given, OF_THE_GATEWAY, reason, f"{way_out}, or leave it out")
    if given.resources is None:
        reason, way_out = f"is not read without {RESOURCES}", f"Describe the machines by {RESOURCES}, or leave it out"
        found += _changed(given, ("wait_for_machines_s",), reason, way_out)
    return [*found, *_of_other_layouts(settings)]


def _of_other_layouts(settings: Settings) -> list[Problem]:
    """How devices change hands where none does; how replicas load while they generate, where none generates then."""
    given = settings.seamless
    if not has_hybrid_rollout(settings):
        reason = "has no effect in the disaggregated layout, where no device both trains and generates"
        names = ["handover"] if given.handover.cuts_calls else []
        names += ["lending"] if given.lending != "never" else []  # which is so there, as is a resident hand-over
        return _changed(given, names, reason, "Leave it out")
    if seamless_layout(settings) is not Layout.COLOCATED:
        return []
    found = _changed(given, ("weights.kv",), "", f"Set {HANDOVER}=resident, or leave it out")
    if not found or (handover := _cutting_handover(settings)) is None:
        return []
    reason = (
        f"has no effect with {HANDOVER}={handover} in the colocated layout, where all replicas load together, "
        "and have no calls then"
    )
    return [problem.changed(reason=reason) for problem in found]


def _cutting_handover(settings: Settings) -> str | None:
    """The hand-over of the run, where engines lose their cache for training's time."""
    try:
        handover = choose_handover(settings).handover
    except ConfigError:  # which other checks report
        return None
    return handover.value if handover.cuts_calls else None


def _masks_nothing(given: SeamlessConfig) -> list[Problem]:
    """A warning where no token can be as old as those that the policy leaves out."""
    bound, policy, older = given.max_staleness, given.tokens.policy, given.tokens.older_than
    if bound is None or older is None or older < bound:
        return []
    reason = f"leaves nothing out: no token is older than seamless.max_staleness={bound}"
    lower = f"Lower its bound to {bound - 1} or less, or set " if bound else "Set "
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


def names_of(node: Any, prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings below a node of settings."""
    for item in fields(node):
        value, name = getattr(node, item.name), f"{prefix}{item.name}"
        if is_dataclass(value) and name not in IN_EVERY_MODE:
            yield from names_of(value, f"{name}.")
        else:
            yield name


def plain_tree(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return value.value if isinstance(value, Enum) else value
