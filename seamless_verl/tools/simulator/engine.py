"""Simulated samples, engines, and the devices that have them.

A sample generates its turns in engines, with tool waits between them, and records the weight versions of its tokens.
The running calls of an engine share its decoding steps, and freeze when it is paused.

Invariants: `remaining` of a running call is what was left of it when its tokens were last counted, never below zero;
its tokens are counted once. The seconds of all kinds of a device add up to the time up to which they were counted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from seamless_verl.resources.lending.policy import Tag, Use
from seamless_verl.tools.simulator.scenario import SimulatedTurn, Turns

NEARLY = 1e-6  # tokens


@dataclass(eq=False)
class SimulatedSample:
    """One session: its turns, its progress, and the versions of its tokens."""

    group: SimulatedGroup
    turns: tuple[SimulatedTurn, ...]
    turn: int = 0
    remaining: float = 0.0
    before: int = 0  # tokens of its conversation before the current turn
    cut: bool = False
    cached: int | None = None  # the version under which an engine has computed its context
    first_version: int | None = None
    generated: float = 0.0
    version_tokens: float = 0.0

    def __post_init__(self) -> None:
        self.remaining, self.before = float(self.turns[0].tokens), self.group.prompt_tokens

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def read_tokens(self) -> int:
        """Tokens of its prompt and of tools' results, which no engine generates."""
        return self.group.prompt_tokens + sum(turn.tool_tokens for turn in self.turns[:-1])

    @property
    def context(self) -> float:
        """Tokens of its conversation up to now."""
        return self.before + self.turns[self.turn].tokens - self.remaining

    def uncomputed(self, version: int, *, keep_cache: bool) -> float:
        """Tokens that an engine must compute before it generates on the weights of `version`.

        A cache that is not kept over a weight update is of no use afterwards. A group's samples share their prompt.
        """
        if self.cut or (self.cached is not None and self.cached != version and not keep_cache):
            return self.context
        if self.turn:
            return self.turns[self.turn - 1].tool_tokens
        return self.group.prompt_tokens / len(self.group.samples)

    def next_turn(self) -> bool:
        """Begin the next turn; False after the last one."""
        ended = self.turns[self.turn]
        self.before += ended.tokens + ended.tool_tokens
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
    prompt_tokens: int = 0

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

    @property
    def trained_tokens(self) -> int:
        """Generated tokens, prompts and tools' results of all its samples."""
        return self.tokens + sum(sample.read_tokens for sample in self.samples)

    @property
    def repeated_tokens(self) -> int:
        """Of the trained tokens, the prompts of all samples but one."""
        return self.prompt_tokens * (len(self.samples) - 1)


@dataclass
class SimulatedEngine:
    """`steps` counts decoding steps; a call with n tokens to go ends n steps after it was added.

    A step takes `step_s` seconds, 0 while none is made. First the engine is busy for `stalled_s` seconds, in which it
    computes what calls have in their context. `keep_cache`: contexts need not be computed again after a weight update.
    """

    seats: int
    prefill_token_s: float = 0.0
    keep_cache: bool = False
    version: int = 0
    steps: float = 0.0
    stalled_s: float = 0.0
    step_s: float = 0.0
    counted_to: float = 0.0
    context: float = 0.0  # tokens of all running conversations
    running: int = 0
    _ends: list[tuple[float, int, SimulatedSample]] = field(default_factory=list)
    _last_end: float = 0.0
    _since: dict[SimulatedSample, float] = field(default_factory=dict)
    _order: Iterator[int] = field(default_factory=count)

    @property
    def samples(self) -> list[SimulatedSample]:
        return [sample for *_, sample in self._ends]

    @property
    def longest(self) -> float:
        """Tokens to go of the call that will end last."""
        return max(0.0, self._last_end - self.steps)

    def count_up_to(self, seconds: float) -> None:
        """Count the decoding steps up to then."""
        elapsed, self.counted_to = seconds - self.counted_to, seconds
        if self.step_s:
            stalled = min(elapsed, self.stalled_s)
            self.stalled_s -= stalled
            self.advance((elapsed - stalled) / self.step_s)

    def advance(self, steps: float) -> None:
        self.steps += steps
        self.context += steps * self.running

    def add(self, sample: SimulatedSample) -> None:
        if sample.first_version is None:
            sample.first_version = self.version
        self.stalled_s += sample.uncomputed(self.version, keep_cache=self.keep_cache) * self.prefill_token_s
        sample.cut, sample.cached = False, self.version
        self._since[sample] = self.steps
        self.context += sample.context
        end = self.steps + sample.remaining
        self._last_end = max(self._last_end, end)
        self.running += 1
        heapq.heappush(self._ends, (end, next(self._order), sample))

    def steps_to_next_end(self) -> float:
        """Decoding steps until a call ends; infinite when none runs."""
        return max(0.0, self._ends[0][0] - self.steps) if self._ends else float("inf")

    def ended(self) -> list[SimulatedSample]:
        """Remove and return the calls that have all their tokens."""
        done = []
        while self._ends and self._ends[0][0] - self.steps <= NEARLY:
            sample = heapq.heappop(self._ends)[2]
            self._count_tokens(sample)
            self.context -= sample.context
            del self._since[sample]
            self.running -= 1
            done.append(sample)
        return done

    def commit(self, version: int) -> None:
        """Go on under the weights of `version`; contexts are computed again unless the cache is kept."""
        for sample in self.samples:
            self._count_tokens(sample)
            self.stalled_s += 0.0 if self.keep_cache else sample.context * self.prefill_token_s
            sample.cached = version
        self.version = version

    def cut(self) -> list[SimulatedSample]:
        """Remove and return all calls, to be continued in another engine."""
        calls = [sample for *_, sample in sorted(self._ends)]
        for sample in calls:
            self._count_tokens(sample)
            sample.cut = True
        self._ends, self._since, self.running = [], {}, 0
        self.stalled_s = self._last_end = self.context = 0.0
        return calls

    def drop(self, samples: set[SimulatedSample]) -> None:
        """Remove the given samples, where they run in this engine."""
        for sample in self.samples:
            self._count_tokens(sample)
        self._ends = [entry for entry in self._ends if entry[2] not in samples]
        heapq.heapify(self._ends)
        self.running = len(self._ends)
        self._last_end = max((end for end, *_ in self._ends), default=0.0)
        self.context = sum(sample.context for sample in self.samples)
        self._since = {sample: at for sample, at in self._since.items() if sample not in samples}

    def _count_tokens(self, sample: SimulatedSample) -> None:
        """Add what it has produced up to now to its tokens of this version."""
        produced = self.steps - self._since[sample]
        self._since[sample] = self.steps
        sample.remaining = max(0.0, sample.remaining - produced)
        sample.generated += produced
        sample.version_tokens += produced * self.version


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
    """A device with its engine; `kind` is what it does, counted from `counted_to` on."""

    name: str
    tags: frozenset[str]
    engine: SimulatedEngine
    use: Use = Use.TRAIN
    switching_until: float | None = None  # the end of a switch to `use`, None outside one
    rate: float = 0.0  # tokens/s of its engine now
    changes: int = 0  # how often what it does has changed
    kind: SimulatedUse = SimulatedUse.IDLE
    counted_to: float = 0.0
    seconds: dict[SimulatedUse, float] = field(default_factory=lambda: dict.fromkeys(SimulatedUse, 0.0))

    def __post_init__(self) -> None:
        if Tag.ROLLOUT in self.tags:
            self.use = Use.ROLLOUT

    @property
    def trains(self) -> bool:
        return Tag.TRAIN in self.tags

    @property
    def generates(self) -> bool:
        return Tag.ROLLOUT in self.tags

    @property
    def serving(self) -> bool:
        """Whether its engine runs calls, but for weight updates."""
        return self.use is Use.ROLLOUT and self.switching_until is None

    @property
    def with_trainer(self) -> bool:
        return self.use is Use.TRAIN and self.switching_until is None

    def count_up_to(self, now: float) -> None:
        """Count the time up to `now` under the present kind."""
        self.seconds[self.kind] += now - self.counted_to
        self.counted_to = now

    def kind_now(self, *, computing: bool, syncing: bool) -> SimulatedUse:
        if syncing:
            return SimulatedUse.SYNC
        if self.switching_until is not None:
            return SimulatedUse.SWITCH
        if computing and self.use is Use.TRAIN:
            return SimulatedUse.TRAIN
        return SimulatedUse.ROLLOUT if self.serving and self.engine.running else SimulatedUse.IDLE
