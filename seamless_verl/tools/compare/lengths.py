"""Whether training favours short answers: the lengths of the samples that were trained, beside those that were drawn.

A run that trains n prompts has drawn the first n prompts that it began; one that takes what ends first trains others in
the place of the long ones among these. A prompt that was drawn and has not ended, or failed, has no length: it counts
as longer than all others in the distance and in p, for left out, the longest would hide the bias. It is in no mean, so
that the ratio of the means is then at most the given one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, isfinite
from statistics import mode
from typing import Any

import numpy as np
import numpy.typing as npt

from seamless_verl.runtime.sample_lengths import RecordedLengths

PERMUTATIONS = 999
SEED = 0  # of the permutations: a report that is written again has the same p
POINTS = 512  # at which distribution functions are compared: all lengths where there are fewer
Groups = Sequence[Sequence[float]]
"""Lengths in tokens, by prompt and sample; infinite where they are not known."""


@dataclass(frozen=True)
class LengthBias:
    """Samples drawn and trained of one run, their mean lengths in tokens, and how much their distributions differ.

    `drawn` and `drawn_mean` are of samples whose length is known. `unknown` counts prompts that were drawn and have no
    length. `distance` is that of Kolmogorov and Smirnov; `p` is None where only one side has prompts of its own.
    """

    drawn: int
    trained: int
    drawn_mean: float
    trained_mean: float
    distance: float
    p: float | None
    unknown: int

    @property
    def ratio(self) -> float:
        """Mean length trained over mean length drawn; at most that where lengths are unknown."""
        return self.trained_mean / self.drawn_mean


def length_bias(record: RecordedLengths) -> LengthBias | None:
    """The bias of a run; None where it trained nothing."""
    drawn, trained = drawn_and_trained(record)
    of_drawn, of_trained = (np.array(list(chain.from_iterable(side.values())), float) for side in (drawn, trained))
    known = of_drawn[np.isfinite(of_drawn)]
    if not len(of_trained) or not len(known):
        return None
    only_drawn = [lengths for place, lengths in drawn.items() if place not in trained]
    only_trained = [lengths for place, lengths in trained.items() if place not in drawn]
    return LengthBias(
        drawn=len(known),
        trained=len(of_trained),
        drawn_mean=float(known.mean()),
        trained_mean=float(of_trained.mean()),
        distance=ks_distance(of_drawn, of_trained),
        p=1.0 if drawn.keys() == trained.keys() else permutation_p(only_drawn, only_trained),
        unknown=sum(not isfinite(lengths[0]) for lengths in drawn.values()),
    )


def drawn_and_trained(record: RecordedLengths) -> tuple[dict[int, Sequence[float]], dict[int, Sequence[float]]]:
    """The lengths of as many prompts as were trained, in the order of their draw; and of those that were."""
    unknown = (inf,) * mode(map(len, record.lengths.values())) if record.lengths else ()
    drawn: dict[int, Sequence[float]] = {at: record.lengths.get(at, unknown) for at in range(len(record.trained))}
    return drawn, {at: record.lengths[at] for at in sorted(record.trained) if at in record.lengths}


def ks_distance(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """The largest difference of two empirical distribution functions."""
    at = np.union1d(first, second)
    shares = (np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (first, second))
    return float(np.abs(np.subtract(*shares)).max())


def permutation_p(first: Groups, second: Groups) -> float | None:
    """How often the distance is as large when chance says which prompts are of which side; None if one has none.

    Prompts are permuted, not samples, for the samples of a prompt have like lengths.
    """
    if not first or not second:
        return None
    groups = [*first, *second]
    lengths = np.unique(np.array(list(chain.from_iterable(groups))))
    at = lengths if len(lengths) <= POINTS else lengths[np.linspace(0, len(lengths) - 1, POINTS).astype(int)]
    # [groups, points]: how many lengths of each group are at most so long
    counts = np.array([np.searchsorted(np.sort(group), at, side="right") for group in groups], float)
    sizes, random = counts[:, -1], np.random.default_rng(SEED)
    chosen = np.zeros((1 + PERMUTATIONS, len(groups)))
    chosen[0, : len(first)] = 1  # as it was seen
    for row in chosen[1:]:
        row[random.permutation(len(groups))[: len(first)]] = 1
    one, other = chosen @ counts, (1 - chosen) @ counts
    distances = np.abs(one / (chosen @ sizes)[:, None] - other / ((1 - chosen) @ sizes)[:, None]).max(axis=1)
    return float((distances >= distances[0] - 1e-12).mean())


def sample_rows(record: RecordedLengths) -> Iterator[dict[str, Any]]:
    """A row for each sample whose length is known: its prompt's place, its tokens, whether drawn, and trained."""
    trained, drawn = set(record.trained), len(record.trained)
    for place, lengths in sorted(record.lengths.items()):
        side = {"drawn": place < drawn, "trained": place in trained}
        yield from ({"prompt": place, "sample": n, "tokens": tokens, **side} for n, tokens in enumerate(lengths))
