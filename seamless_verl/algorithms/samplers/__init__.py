"""Samplers: decide which prompts are sampled and how often, from what is known of each. Pure.

`SAMPLERS` has them by the names of `seamless.sampler.name`. A new one is a file here and an entry in it.
"""

from __future__ import annotations

from collections.abc import Mapping

from seamless_verl.algorithms.samplers.dars import Dars, DarsHardness
from seamless_verl.algorithms.samplers.gdro import Gdro
from seamless_verl.algorithms.samplers.sampler import (
    FinishedGroup,
    GroupResult,
    GroupVerdict,
    PromptHistory,
    Sampler,
    SamplingView,
)
from seamless_verl.algorithms.samplers.sampling import EndedGroup, PromptSampling
from seamless_verl.algorithms.samplers.srpo import Srpo
from seamless_verl.algorithms.samplers.xrpo import Xrpo
from seamless_verl.errors import ConfigError

__all__ = (
    "SAMPLERS",
    "EndedGroup",
    "FinishedGroup",
    "GroupResult",
    "GroupVerdict",
    "PromptHistory",
    "PromptSampling",
    "Sampler",
    "SamplingView",
    "make_sampler",
    "sampler_named",
)

SAMPLERS: dict[str, type[Sampler]] = {
    "dars": Dars,
    "dars_hardness": DarsHardness,
    "gdro": Gdro,
    "srpo": Srpo,
    "xrpo": Xrpo,
}


def sampler_named(name: str) -> type[Sampler]:
    """The class of that name; raises ConfigError with the names there are."""
    if name not in SAMPLERS:
        way_out = f"Choose one of {sorted(SAMPLERS)}"
        raise ConfigError("seamless.sampler.name", name, "there is no such sampler", way_out)
    return SAMPLERS[name]


def make_sampler(name: str, options: Mapping[str, object]) -> Sampler:
    """A new sampler of that name; an option that is None, or that it does not read, is left at its default."""
    kind = sampler_named(name)
    given = {key: options[key] for key in kind.OPTIONS if options.get(key) is not None}
    return kind(**given)
