"""The schema of `seamless.sampler`: what decides how many samples a prompt gets, and its options.

It is not verl's `trainer.v1.sampler`, which draws from the replay buffer, nor a sampler of the data's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from seamless_verl.runtime.fields import Doc, Positive

SamplerName: TypeAlias = Literal["dars", "gdro", "srpo", "xrpo"]
Schedule: TypeAlias = Literal["equal", "hardness"]
Share: TypeAlias = Annotated[float, Meta(ge=0.01, le=1)]
OPTIONS = ("schedule", "threshold", "rate", "least", "most")
"""Options of single samplers; each reads some of them."""


@dataclass(frozen=True)
class SamplerConfig:
    """The sampler, one of algorithms/samplers/. An option that is null has the value of the sampler's paper."""

    name: Annotated[
        SamplerName | None,
        Doc(
            "decides how many samples a prompt gets; it is not verl's `trainer.v1.sampler`, which chooses among the "
            "samples that there are, nor does it order the data's prompts. `dars`: hard ones get more before their "
            "group is trained; `gdro`: in proportion to how often it fails; `xrpo`: where one more says most; `srpo`: "
            "prompts that were learned are left out; `null` gives each `actor_rollout_ref.rollout.n`"
        ),
    ] = None
    success: Annotated[
        float | None,
        Doc(
            "the least reward of a right answer; `null` takes rewards as they are, which then are from 0 to 1",
        ),
    ] = None
    schedule: Annotated[
        Schedule | None,
        Doc(
            "for `dars`: `equal` brings hard prompts to the weight of middling ones, `hardness` beyond; `null`: `equal`"
        ),
    ] = None
    threshold: Annotated[
        Share | None,
        Doc(
            "for `srpo`: the pass rate from which on a prompt is left out for good, ScaleRL's is 0.9; `null` leaves "
            "one whose samples were all right out of the next epoch"
        ),
    ] = None
    rate: Annotated[
        Share | None,
        Doc("for `gdro`: the share of the newest group in a prompt's moving average of pass rates; `null` is 0.15"),
    ] = None
    least: Annotated[
        Positive | None,
        Doc("for `gdro` and `xrpo`: the fewest samples of a prompt; `null` is 2"),
    ] = None
    most: Annotated[
        Positive | None,
        Doc(
            "for `dars`, `gdro` and `xrpo`: the most samples of a prompt; `null` is 32 for `dars` (64 with "
            "`schedule=hardness`), else 128"
        ),
    ] = None

    @property
    def options(self) -> dict[str, Any]:
        """The options by name, None where the sampler's own value holds."""
        return {name: getattr(self, name) for name in OPTIONS}
