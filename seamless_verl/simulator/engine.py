"""One engine: its running calls share one decoding step after another, and freeze when it is paused.

Invariant: `left` of a running call is its tokens at the last `settle`, never below zero; a call is in the
engine or out of it, and its tokens are counted once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from seamless_verl.simulator.samples import Sample

NEARLY = 1e-9  # tokens


@dataclass
class Engine:
    """`steps` counts decoding steps; a call with n tokens left ends n steps after it came.

    No step is made for `stalled_s` seconds, in which the engine computes again what was cut elsewhere.
    """

    seats: int
    steps: float = 0.0
    stalled_s: float = 0.0
    _ends: list[tuple[float, int, Sample]] = field(default_factory=list)
    _since: dict[Sample, float] = field(default_factory=dict)
    _order: Iterator[int] = field(default_factory=count)

    @property
    def running(self) -> int:
        return len(self._ends)

    @property
    def samples(self) -> list[Sample]:
        return [sample for *_, sample in self._ends]

    @property
    def longest(self) -> float:
        """Tokens left of the call that will end last."""
        return max((end for end, *_ in self._ends), default=self.steps) - self.steps

    def add(self, sample: Sample, version: int, *, prefill_token_s: float) -> None:
        if sample.first_version is None:
            sample.first_version = version
        self.stalled_s += sample.recomputed * prefill_token_s
        sample.cut = False
        self._since[sample] = self.steps
        heapq.heappush(self._ends, (self.steps + sample.left, next(self._order), sample))

    def steps_to_next_end(self) -> float:
        """Decoding steps until a call ends; infinite when none runs."""
        return max(0.0, self._ends[0][0] - self.steps) if self._ends else float("inf")

    def advance(self, steps: float) -> None:
        self.steps += steps

    def ended(self, version: int) -> list[Sample]:
        """Take out the calls that have all their tokens."""
        done = []
        while self._ends and self._ends[0][0] - self.steps <= NEARLY:
            sample = heapq.heappop(self._ends)[2]
            self._settle(sample, version)
            del self._since[sample]
            done.append(sample)
        return done

    def settle(self, version: int) -> None:
        """Count what the running calls have produced up to now under `version`."""
        for _, _, sample in self._ends:
            self._settle(sample, version)

    def cut(self, version: int) -> list[Sample]:
        """Take out all calls, to go on elsewhere."""
        self.settle(version)
        calls = [sample for *_, sample in sorted(self._ends)]
        self._ends, self._since, self.stalled_s = [], {}, 0.0
        for sample in calls:
            sample.cut = True
        return calls

    def drop(self, samples: set[Sample], version: int) -> None:
        """Take out those of `samples` that run here."""
        self.settle(version)
        self._ends = [entry for entry in self._ends if entry[2] not in samples]
        heapq.heapify(self._ends)
        self._since = {sample: at for sample, at in self._since.items() if sample not in samples}

    def _settle(self, sample: Sample, version: int) -> None:
        produced = self.steps - self._since[sample]
        self._since[sample] = self.steps
        sample.left = max(0.0, sample.left - produced)
        sample.produce(produced, version)
