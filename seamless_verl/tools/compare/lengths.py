"""Whether training favours short answers: the lengths of the samples that were trained, beside those that were drawn.

A run that trains n prompts has drawn the first n prompts that it began. One that takes what ends first trains others in
the place of the long ones among these. So both have as many prompts, and where they are the same there is no bias.

- The distance is that of Kolmogorov and Smirnov: the largest difference of the two distribution functions.
- p is that of a permutation test of this distance: how often it is as large when chance says which of the prompts that
  only one of the two has was trained. Prompts are permuted, not samples, for the samples of a prompt have like lengths.
- Of a prompt that was drawn and has not ended, or failed, no length is known. Where a run ends, the long ones are those
  that have not ended: left out, they would hide the bias that is looked for. So such a prompt counts as longer than all
  others, in the distance and in p. It is in no mean, and the ratio of the means is then a bound: it is at most that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    length; `p` is None where only one of the two sides has prompts of its own.
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
    of_drawn, of_trained = (
        np.array(list(chain.from_iterable(side.values())), dtype=float) for side in (drawn, trained)
    )
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
    """The lengths of as many prompts as were trained, in the order of their draw; and of those that were.

    Of a prompt without lengths they are infinite, as many as most prompts have; of one that was trained there are some.
    """
    drawn, trained = range(len(record.trained)), sorted(record.trained)
    unknown = (inf,) * mode(map(len, record.lengths.values())) if record.lengths else ()
    first: dict[int, Sequence[float]] = {at: record.lengths.get(at, unknown) for at in drawn}
    return first, {at: record.lengths[at] for at in trained if at in record.lengths}


def ks_distance(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """The largest difference of two empirical distribution functions."""
    at = np.union1d(first, second)
    shares = (np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (first, second))
    return float(np.abs(np.subtract(*shares)).max())


def permutation_p(first: Groups, second: Groups) -> float | None:
    """The share of `PERMUTATIONS` exchanges of groups between both, and of what was seen, with at least its distance.

    None where one of both has no group.
    """
    if not first or not second:
        return None
    groups = [*first, *second]
    counts = below(groups)
    sizes = counts[:, -1]
    chosen = np.zeros((1 + PERMUTATIONS, len(groups)))
    chosen[0, : len(first)] = 1  # as it was seen
    random = np.random.default_rng(SEED)
    for row in chosen[1:]:
        row[random.permutation(len(groups))[: len(first)]] = 1
    one, other = chosen @ counts, (1 - chosen) @ counts
    distances = np.abs(one / (chosen @ sizes)[:, None] - other / ((1 - chosen) @ sizes)[:, None]).max(axis=1)
    return float((distances >= distances[0] - 1e-12).mean())


def below(groups: Groups) -> npt.NDArray[np.float64]:
    """[groups, points]: how many lengths of each group are at most so long; the last point is the longest of all."""
    lengths = np.unique(np.array(list(chain.from_iterable(groups))))
    at = lengths if len(lengths) <= POINTS else lengths[np.linspace(0, len(lengths) - 1, POINTS).astype(int)]
    return np.array([np.searchsorted(np.sort(group), at, side="right") for group in groups], dtype=float)


def sample_rows(record: RecordedLengths) -> Iterator[Mapping[str, Any]]:
    """A row for each sample whose length is known: its prompt's place, its tokens, whether drawn, and trained."""
    trained = set(record.trained)
    for place, lengths in sorted(record.lengths.items()):
        for sample, tokens in enumerate(lengths):
            yield {
                "prompt": place,
                "sample": sample,
                "tokens": tokens,
                "drawn": place < len(record.trained),
                "trained": place in trained,
            }
