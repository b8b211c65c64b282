"""What every sample of a run was, and whether two runs did the same work. Pure.

A line of `samples.jsonl`: the prompt's index, the sample in its group, prompt ids, the lengths and seconds of its
turns. Law: samples at the same place have the same prompt and the same lengths in every run of a workload.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

Place = tuple[int, int]


@dataclass(frozen=True)
class Sample:
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def same_work(self, other: Sample) -> bool:
        return self.prompt == other.prompt and self.tokens == other.tokens


def read_samples(path: Path) -> dict[Place, Sample]:
    """By place. Raises ValueError for a place that comes twice: the data set would have begun anew."""
    found: dict[Place, Sample] = {}
    for line in path.read_text().splitlines():
        values = json.loads(line)
        place = (values["index"], values["session"])
        if place in found:
            raise ValueError(f"{path}: {place} was generated twice")
        found[place] = Sample(*(tuple(values[name]) for name in ("prompt", "tokens", "seconds")))
    return found


def differences(runs: Mapping[str, Mapping[Place, Sample]]) -> list[str]:
    """Where runs did other work than the first run that came to that place; empty when all did the same."""
    first: dict[Place, tuple[str, Sample]] = {}
    found: list[str] = []
    for name, samples in runs.items():
        for place, sample in samples.items():
            earlier, known = first.setdefault(place, (name, sample))
            if not known.same_work(sample):
                found.append(f"{name} differs from {earlier} at prompt {place[0]}, sample {place[1]}")
    return found


def in_all(runs: Iterable[Iterable[Place]]) -> int:
    """How many places every run has come to."""
    places = [set(samples) for samples in runs]
    return len(set.intersection(*places)) if places else 0


def mean_prompt(samples: Iterable[Sample]) -> float:
    """Tokens."""
    return mean(len(sample.prompt) for sample in samples)


def mean_turn_s(samples: Iterable[Sample]) -> float:
    """Seconds that a turn's generation took, waiting in a queue and pauses included."""
    return mean(second for sample in samples for second in sample.seconds)
