"""Which of verl's validation metrics are the reward, and their mean over data sources. Pure.

verl names a metric `val-core/<data source>/<variable>/mean@<n>`, n being the samples of a prompt, or `val-aux/...`. The
variable `reward` is there for every source; it is core unless the source has `acc`, and with the most samples. So there
is one reward for each source, the core one if there is one and else that with the most samples. A validation's reward
is their mean, in which each source counts alike, however many prompts it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from numbers import Real
from statistics import mean
from typing import Any

NAME = re.compile(r"(?P<section>val[\w-]*)/(?:(?P<source>.+)/)?reward/mean@(?P<samples>\d+)")
CORE = "val-core"


def reward_metrics(names: Iterable[str]) -> list[str]:
    """The name of each data source's mean reward, in the order of the sources' names; none without a validation."""
    found = dict[str, tuple[tuple[bool, int], str]]()
    for name in names:
        if (match := NAME.fullmatch(name)) is not None:
            rank = match["section"] == CORE, int(match["samples"])
            source = match["source"] or ""
            found[source] = max(found.get(source, (rank, name)), (rank, name))
    return [found[source][1] for source in sorted(found)]


def validation_reward(metrics: Mapping[str, Any]) -> tuple[float | None, str]:
    """The mean of the sources' rewards, and of which metrics; (None, "") in a step without a validation."""
    names = [name for name in reward_metrics(metrics) if isinstance(metrics[name], Real)]
    return (mean(float(metrics[name]) for name in names), mean_words(names)) if names else (None, "")


def mean_words(names: list[str]) -> str:
    """Of which metrics it is the mean: the name of the only one, or all of them."""
    return names[0] if len(names) == 1 else f"the mean of {', '.join(names[:-1])} and {names[-1]}"
