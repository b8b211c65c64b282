"""Simulated samples, engines and devices.

A sample generates its turns in engines, with tool waits between them, and records the weight versions of its tokens.
The running calls of an engine share its decoding steps, and freeze when it is paused. A device has a use, the switch
it may be in, an engine, and the seconds of each kind.

Invariants:
- `remaining` of a running call is what was left of it at the last `count_produced`, never below zero; its tokens are
  counted once.
- The seconds of all kinds of a device add up to the time that has passed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from seamless_verl.resources.lending import Tag, Use
from seamless_verl.simulator.scenario import SimulatedTurn, Turns


@dataclass(eq=False)
class SimulatedSample:
    """One session: its turns, its progress, and the versions of its tokens."""

    group: SimulatedGroup
    turns: tuple[SimulatedTurn, ...]
    turn: int = 0
    remaining: float = 0.0
    cut: bool = False
    first_version: int | None = None
    generated: float = 0.0
    version_tokens: float = 0.0

    def __post_init__(self) -> None:
        self.remaining = float(self.turns[0].tokens)

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def recomputed(self) -> float:
        """Tokens generated before that an engine must compute again before it continues."""
        before = sum(turn.tokens for turn in self.turns[: self.turn + 1])
        return before - self.remaining if self.cut else 0.0

    def produce(self, tokens: float, version: int) -> None:
        """Add tokens generated on one weight version."""
        self.generated += tokens
        self.version_tokens += tokens * version

    def next_turn(self) -> bool:
        """Begin the next turn; False after the last one."""
        self.turn += 1
        if self.turn == len(self.turns):
            return False
        self.remaining = float(self.turns[self.turn].tokens)
        return True


@dataclass(eq=False)
class SimulatedGroup:
    """The samples of one prompt, `prompt` of the data; `submitted` is the step of its submission."""

    number: int
    submitted: int
    samples: list[SimulatedSample] = field(default_factory=list)
    unfinished: int = 0
    prompt: int = 0

    @classmethod
    def of(cls, number: int, submitted: int, samples: list[Turns], prompt: int = 0) -> SimulatedGroup:
        group = cls(number, submitted, prompt=prompt)
        group.add(samples)
        return group

    def add(self, samples: list[Turns]) -> list[SimulatedSample]:
        """Adds samples that are to be generated, and returns them."""
        added = [SimulatedSample(self, turns) for turns in samples]
        self.samples += added
        self.unfinished += len(added)
        return added

    @property
    def tokens(self) -> int:
        """Generated tokens of all its samples."""
        return sum(sample.tokens for sample in self.samples)


NEARLY = 1e-9  # tokens


@dataclass
class SimulatedEngine:
    """`steps` counts decoding steps; a call with n tokens to go ends n steps after it was added.

    No step is made for `stalled_s` seconds, in which the engine computes the tokens of cut calls again.
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
        """Tokens to go of the call that will end last."""
        return max((end for end, *_ in self._ends), default=self.steps) - self.steps

    def add(self, sample: SimulatedSample, version: int, *, prefill_token_s: float) -> None:
        if sample.first_version is None:
            sample.first_version = version
        self.stalled_s += sample.recomputed * prefill_token_s
        sample.cut = False
        self._since[sample] = self.steps
        heapq.heappush(self._ends, (self.steps + sample.remaining, next(self._order), sample))

    def steps_to_next_end(self) -> float:
        """Decoding steps until a call ends; infinite when none runs."""
        return max(0.0, self._ends[0][0] - self.steps) if self._ends else float("inf")

    def advance(self, steps: float) -> None:
        self.steps += steps

    def ended(self, version: int) -> list[SimulatedSample]:
        """Remove and return the calls that have all their tokens."""
        done = []
        while self._ends and self._ends[0][0] - self.steps <= NEARLY:
            sample = heapq.heappop(self._ends)[2]
            self._count_produced_of(sample, version)
            del self._since[sample]
            done.append(sample)
        return done

    def count_produced(self, version: int) -> None:
        """Add what the running calls have produced up to now to their tokens of `version`."""
        for _, _, sample in self._ends:
            self._count_produced_of(sample, version)

    def cut(self, version: int) -> list[SimulatedSample]:
        """Remove and return all calls, to be continued in another engine."""
        self.count_produced(version)
        calls = [sample for *_, sample in sorted(self._ends)]
        self._ends, self._since, self.stalled_s = [], {}, 0.0
        for sample in calls:
            sample.cut = True
        return calls

    def drop(self, samples: set[SimulatedSample], version: int) -> None:
        """Remove the given samples, where they run in this engine."""
        self.count_produced(version)
        self._ends = [entry for entry in self._ends if entry[2] not in samples]
        heapq.heapify(self._ends)
        self._since = {sample: at for sample, at in self._since.items() if sample not in samples}

    def _count_produced_of(self, sample: SimulatedSample, version: int) -> None:
        produced = self.steps - self._since[sample]
        self._since[sample] = self.steps
        sample.remaining = max(0.0, sample.remaining - produced)
        sample.produce(produced, version)


class SimulatedUse(StrEnum):
    """What a simulated device-second was spent on."""

    TRAIN = "train"
    """computing for the trainer"""
    ROLLOUT = "rollout"
    """generating: its engine had a running call"""
    SWITCH = "switch"
    """changing its use"""
    SYNC = "sync"
    """a weight update"""
    IDLE = "idle"
    """none of these"""


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
    def create(cls, name: str, tags: frozenset[str], seats: int) -> SimulatedDevice:
        return cls(name, tags, SimulatedEngine(seats), Use.ROLLOUT if Tag.ROLLOUT in tags else Use.TRAIN)

    @property
    def trains(self) -> bool:
        return Tag.TRAIN in self.tags

    @property
    def serving(self) -> bool:
        """Whether its engine takes and runs calls, but for weight updates."""
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
