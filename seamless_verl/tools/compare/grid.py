"""Arms repeated over permitted staleness and over learning rates: `--staleness 0,1,4 --learning-rates 5e-4,1e-3`. Pure.

Permitted staleness (`seamless.max_staleness`) is a setting of ours alone: verl's modes, and an arm of ours that has one
already, stay as they are. A learning rate is for every arm; each is then compared with the baseline of its rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from seamless_verl.errors import ConfigError
from seamless_verl.tools.compare.arms import ComparedArm, folder_name

BOUND, RATE = "seamless.max_staleness", "actor_rollout_ref.actor.optim.lr"


def repeated(arms: Sequence[ComparedArm], bounds: Sequence[int], rates: Sequence[str]) -> list[ComparedArm]:
    """Each arm with each bound and each rate, those of one rate together.

    Raises:
        ConfigError: no arm takes a bound, an arm has a learning rate of its own, or two have one name.
    """
    if bounds and not any(takes_bound(arm) for arm in arms):
        way_out = "Name seamless among --arms, or leave --staleness out"
        raise ConfigError(
            "--staleness", list(bounds), "no arm takes it: verl's modes do not, nor one that has its own", way_out
        )
    bounded = [one for arm in arms for one in (with_bounds(arm, bounds) if takes_bound(arm) else [arm])]
    if rates:
        check_rates(bounded)
        bounded = [with_rate(arm, rate) for rate in rates for arm in bounded]
    if len({folder_name(arm.name) for arm in bounded}) < len(bounded):
        raise ConfigError("--arms", [arm.name for arm in bounded], "two have one name", "Name them otherwise")
    return bounded


def takes_bound(arm: ComparedArm) -> bool:
    return arm.is_ours and not sets(arm, BOUND)


def sets(arm: ComparedArm, key: str) -> bool:
    return any(setting.lstrip("+").startswith(f"{key}=") for setting in arm.settings)


def with_bounds(arm: ComparedArm, bounds: Sequence[int]) -> list[ComparedArm]:
    """The arm with each bound, or as it is without any."""
    return [replace(with_setting(arm, f"{BOUND}={bound}", f"s={bound}"), line=arm.name) for bound in bounds] or [arm]


def with_rate(arm: ComparedArm, rate: str) -> ComparedArm:
    line = f"{arm.line or arm.name} lr={rate}"
    return replace(with_setting(arm, f"{RATE}={rate}", f"lr={rate}"), rate=rate, system=arm.name, line=line)


def with_setting(arm: ComparedArm, setting: str, mark: str) -> ComparedArm:
    """The arm with one more setting, which its name has as a mark."""
    return replace(arm, text=f"{arm.text}:{setting}", name=f"{arm.name} {mark}", settings=(*arm.settings, setting))


def check_rates(arms: Sequence[ComparedArm]) -> None:
    """ConfigError for an arm that has a learning rate already."""
    for arm in arms:
        if sets(arm, RATE):
            raise ConfigError("--learning-rates", arm.text, f"sets {RATE} itself", "Leave it out of the arm")


def parse_bounds(text: str) -> list[int]:
    """Whole numbers between commas; ConfigError for anything else."""
    parts = text.split(",")
    way_out = "Write them as --staleness 0,1,4"
    if not all(part.isdecimal() for part in parts):
        raise ConfigError("--staleness", text, "are not whole numbers of 0 or more between commas", way_out)
    bounds = [int(part) for part in parts]
    if len(set(bounds)) < len(bounds):
        raise ConfigError("--staleness", text, "names one twice", way_out)
    return bounds


def parse_rates(text: str) -> list[str]:
    """Numbers above 0 between commas, as they were written; ConfigError for anything else."""
    parts = text.split(",")
    try:
        values = {float(part) for part in parts}
    except ValueError:
        values = {0.0}
    way_out = "Write them as --learning-rates 5e-4,1e-3"
    if not all(0 < value < 1 for value in values):
        raise ConfigError("--learning-rates", text, "are not numbers between 0 and 1", way_out)
    if len(values) < len(parts):
        raise ConfigError("--learning-rates", text, "names one twice", way_out)
    return parts
