"""A prompt's samples on their way through engines and tools, and the weight versions of their tokens.

One engine: its running calls share one decoding step after another, and freeze when it is paused.

Invariant: `left` of a running call is its tokens at the last `settle`, never below zero; a call is in the
engine or out of it, and its tokens are counted once.

One simulated device: its use, the switch it may be in, its engine, and the seconds of each kind.

Invariant: the seconds of all kinds add up to the time that has passed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from seamless_verl.resources.lending import Tag, Use
from seamless_verl.simulator.scenario import SimulatedTurn


@dataclass(eq=False)
class SimulatedSample:
    """One session: its turns, how far it has come, and how old its tokens are."""

    group: SimulatedGroup
    turns: tuple[SimulatedTurn, ...]
    turn: int = 0
    left: float = 0.0
    cut: bool = False
    first_version: int | None = None
    generated: float = 0.0
    version_tokens: float = 0.0

    def __post_init__(self) -> None:
        self.left = float(self.turns[0].tokens)

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def recomputed(self) -> float:
        """Tokens of its own that an engine must compute again before it goes on."""
        before = sum(turn.tokens for turn in self.turns[: self.turn + 1])
        return before - self.left if self.cut else 0.0

    def produce(self, tokens: float, version: int) -> None:
        """Tokens generated on one weight version."""
        self.generated += tokens
        self.version_tokens += tokens * version

    def next_turn(self) -> bool:
        """Go on to the next turn; False after the last one."""
        self.turn += 1
        if self.turn == len(self.turns):
            return False
        self.left = float(self.turns[self.turn].tokens)
        return True


@dataclass(eq=False)
class SimulatedGroup:
    """The samples of one prompt; `submitted` is the step in which it was."""

    number: int
    submitted: int
    samples: list[SimulatedSample] = field(default_factory=list)
    unfinished: int = 0

    @classmethod
    def of(cls, number: int, submitted: int, samples: list[tuple[SimulatedTurn, ...]]) -> SimulatedGroup:
        group = cls(number, submitted, unfinished=len(samples))
        group.samples = [SimulatedSample(group, turns) for turns in samples]
        return group

    @property
    def tokens(self) -> int:
        """Generated tokens of all its samples."""
        return sum(sample.tokens for sample in self.samples)


NEARLY = 1e-9  # tokens


@dataclass
class SimulatedEngine:
    """`steps` counts decoding steps; a call with n tokens left ends n steps after it came.

    No step is made for `stalled_s` seconds, in which the engine computes again what was cut elsewhere.
    """

    seats: int
    steps: float = 0.0
    stalled_s: float = 0.0
    _ends: list[tuple[float, int, SimulatedSample]] = field(default_factory=list)
    _since: dict[SimulatedSample, float] = field(default_factory=dict)
    _order: Iterator[int] = field(default_factory=count)

    @property
    def running(self) -> int:
        return len(self._ends)

    @property
    def samples(self) -> list[SimulatedSample]:
        return [sample for *_, sample in self._ends]

    @property
    def longest(self) -> float:
        """Tokens left of the call that will end last."""
        return max((end for end, *_ in self._ends), default=self.steps) - self.steps

    def add(self, sample: SimulatedSample, version: int, *, prefill_token_s: float) -> None:
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

    def ended(self, version: int) -> list[SimulatedSample]:
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

    def cut(self, version: int) -> list[SimulatedSample]:
        """Take out all calls, to go on elsewhere."""
        self.settle(version)
        calls = [sample for *_, sample in sorted(self._ends)]
        self._ends, self._since, self.stalled_s = [], {}, 0.0
        for sample in calls:
            sample.cut = True
        return calls

    def drop(self, samples: set[SimulatedSample], version: int) -> None:
        """Take out those of `samples` that run here."""
        self.settle(version)
        self._ends = [entry for entry in self._ends if entry[2] not in samples]
        heapq.heapify(self._ends)
        self._since = {sample: at for sample, at in self._since.items() if sample not in samples}

    def _settle(self, sample: SimulatedSample, version: int) -> None:
        produced = self.steps - self._since[sample]
        self._since[sample] = self.steps
        sample.left = max(0.0, sample.left - produced)
        sample.produce(produced, version)


class SimulatedUse(StrEnum):
    """What a device's second went into."""

    TRAIN = "train"
    """computing for the trainer"""
    ROLLOUT = "rollout"
    """generating: its engine had a running call"""
    SWITCH = "switch"
    """changing its use"""
    SYNC = "sync"
    """a weight update"""
    IDLE = "idle"
    """nothing of these"""


@dataclass
class SimulatedDevice:
    """`switching_until` is the end of a switch to `use`, None outside one."""

    name: str
    tags: frozenset[str]
    engine: SimulatedEngine
    use: Use
    switching_until: float | None = None
    seconds: dict[SimulatedUse, float] = field(default_factory=lambda: dict.fromkeys(SimulatedUse, 0.0))

    @classmethod
    def fresh(cls, name: str, tags: frozenset[str], seats: int) -> SimulatedDevice:
        return cls(name, tags, SimulatedEngine(seats), Use.ROLLOUT if Tag.ROLLOUT in tags else Use.TRAIN)

    @property
    def trains(self) -> bool:
        return Tag.TRAIN in self.tags

    @property
    def serving(self) -> bool:
        """Its engine takes and runs calls, weight updates apart."""
        return self.use is Use.ROLLOUT and self.switching_until is None

    @property
    def with_trainer(self) -> bool:
        return self.use is Use.TRAIN and self.switching_until is None

    def kind(self, *, computing: bool, syncing: bool) -> SimulatedUse:
        if syncing:
            return SimulatedUse.SYNC
        if self.switching_until is not None:
            return SimulatedUse.SWITCH
        if self.use is Use.TRAIN:
            return SimulatedUse.TRAIN if computing else SimulatedUse.IDLE
        return SimulatedUse.ROLLOUT if self.engine.running else SimulatedUse.IDLE
