"""How far generation may run ahead of training (`StalenessBound`), and how far it does (`AheadLevel`). Pure.

A prompt submitted in step p starts on the weights of version p - 1, and step g trains the weights of version g - 1, so
that its oldest token is g - p versions old. With at most (S + 1) steps' worth of prompts outstanding when the step
begins, and the oldest taken first, none is trained more than S versions late: the i-th oldest waits for i // batch
updates. A prompt submitted later in the step has missed its first updates, and as many fewer may be outstanding. Taking
a younger group while an older one still generates is allowed only if every prompt left behind can be trained in time.

How many steps' worth are outstanding decides how old most tokens are. So the run begins with half of what the bound
permits, and looks for the least at which engines lose little: they lose, while training waits for groups, where they
have too few calls for their full rate (`EngineUse`). What more or less would bring is not tried, since a trial would be
decided by the long samples that happen to be in it. It follows from what engines would lose with more or fewer calls in
the same waits. Less is safe only where no step of a window would lose by it, and where the devices that generate are
busy: that engines have nothing to do while training prepares a batch is not seen in waits.

Legal transitions of `level` in a run: down by one, until it went up; up by one. A resume cuts it to a smaller bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Protocol

from seamless_verl.resources.lending.marginal import RateCurve


@dataclass(frozen=True)
class StalenessBound:
    """`max_staleness` in weight versions; `batch` prompts an update, `updates` of them a step."""

    max_staleness: int
    batch: int
    updates: int = 1

    def room(self, outstanding: int, ahead: int | None = None, update: int = 0) -> int:
        """How many more prompts may be submitted before update number `update` (from 0) of a step.

        With `ahead`, at most `ahead` + 1 steps' worth are outstanding at any time, and with 0 none is submitted
        for a later step. Without it as many as the bound allows.
        """
        step, trained = self.batch * self.updates, update * self.batch
        allowed = (self.max_staleness + 1) * step - trained
        wanted = allowed if ahead is None else (ahead + 1) * step if ahead else step - trained
        return max(0, min(allowed, wanted) - outstanding)

    def too_old(self, step: int, submitted: int) -> bool:
        """Whether training in `step` a prompt of step `submitted` would pass the bound."""
        return step - submitted > self.max_staleness

    def keeps(self, *, step: int, update: int, left_behind: Iterable[int]) -> bool:
        """Whether prompts left behind by update number `update` (from 0) of `step` stay within the bound.

        `left_behind` holds the steps in which they were submitted.
        """
        return not any(
            self.too_old(step + (update + 1 + i // self.batch) // self.updates, submitted)
            for i, submitted in enumerate(sorted(left_behind))
        )


LOOK_S = 0.2  # between two looks: calls report their tokens in pieces


class EngineLoad(Protocol):
    """An engine at one moment: its `running` calls, its `slots` for calls, the tokens it generated so far, and whether
    it `serves`, or is paused."""

    @property
    def replica_id(self) -> str: ...

    @property
    def running(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def generated(self) -> float: ...

    @property
    def serves(self) -> bool: ...


@dataclass(frozen=True)
class EngineLoss:
    """Seconds of full rate that engines lost in a step, as the mean over the engines.

    `with_fewer` and `with_more` estimate what they would have lost in the same waits with one step's worth of prompts
    fewer, and more.
    """

    seconds: float = 0.0
    with_fewer: float = 0.0
    with_more: float = 0.0


class EngineUse:
    """Looks at the engines while training waits."""

    def __init__(self) -> None:
        self.curve = RateCurve()
        self.lost = EngineLoss()
        self._last: tuple[float, Mapping[str, EngineLoad]] | None = None

    def due(self, now: float) -> bool:
        """Whether it is time for a look."""
        return self._last is None or now - self._last[0] >= LOOK_S

    def look(self, loads: Sequence[EngineLoad], waiting: int, now: float, ahead: int) -> None:
        """Counts what was lost since the last look; the first look of a wait only begins. `waiting` calls have no slot.

        Calls come from `ahead` + 1 steps' worth of prompts, and are more or fewer in proportion with another number.
        """
        if self._last is not None:
            self._count(self._last[1], loads, waiting / max(1, len(loads)), now - self._last[0], 1 / (ahead + 1))
        self._last = (now, {load.replica_id: load for load in loads})

    def wait_ended(self) -> None:
        self._last = None

    def take(self) -> EngineLoss:
        """What was lost since the last call."""
        lost, self.lost = self.lost, EngineLoss()
        return lost

    def _count(
        self, before: Mapping[str, EngineLoad], after: Sequence[EngineLoad], waiting: float, seconds: float, step: float
    ) -> None:
        """`waiting` calls an engine have no slot; `step` is one step's share of all calls."""
        shares: list[list[float]] = []  # of the full rate: as it is, with fewer and with more calls
        for load in after:
            earlier = before.get(load.replica_id, load)
            calls = round((earlier.running + load.running) / 2)
            restarted = load.generated < earlier.generated  # its data plane
            if load.serves and earlier.serves and not restarted:
                self.curve.observe(calls, (load.generated - earlier.generated) / seconds, seconds)
            there = calls + waiting
            fewer, more = min(calls, there * (1 - step)), max(calls, min(load.slots, there * (1 + step)))
            shares.append([self.curve.efficiency(number, load.slots) for number in (calls, fewer, more)])
        if shares:
            as_is, fewer, more = (seconds * (1 - mean(of_all)) for of_all in zip(*shares, strict=True))
            lost = self.lost
            self.lost = EngineLoss(lost.seconds + as_is, lost.with_fewer + fewer, lost.with_more + more)


WINDOW = 6  # steps that are looked at
WORTH = 0.05  # share of a step: less lost engine time is not worth older tokens


class AheadLevel:
    """Steps' worth of prompts that are outstanding beyond the current step's, from 1 to `most`; `most` if that is 0."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.level = (most + 1) // 2
        self.descends = True  # until it went up
        self.settling = 1  # steps until a change has had its effect; the first one starts the engines
        self.with_fewer: deque[float] = deque(maxlen=WINDOW)  # shares of a step that would have been lost
        self.idle: deque[float] = deque(maxlen=WINDOW)  # shares of the time of devices that generate
        self.gains: deque[float] = deque(maxlen=WINDOW)  # shares of a step that more would have saved

    def step_ended(self, step_s: float, lost: EngineLoss, idle: float = 0.0) -> str | None:
        """A step has taken `step_s` seconds, of which engines lost some; says what was changed, and why.

        `idle` is the share of the step in which devices that generate computed nothing.
        """
        if step_s <= 0:
            return None
        if self.settling:
            self.settling -= 1
            return None
        self.with_fewer.append(lost.with_fewer / step_s)
        self.idle.append(idle)
        self.gains.append((lost.seconds - lost.with_more) / step_s)
        if len(self.gains) < WINDOW:
            return None
        gain, loss = mean(self.gains), max(self.with_fewer)
        if gain > WORTH and self.level < self.most:
            self.descends = False
            self._change(self.level + 1)
            return f"one more would have kept engines from losing {gain:.0%} of the last steps"
        if loss <= WORTH and median(self.idle) <= WORTH and self.level > 1 and self.descends:
            self._change(self.level - 1)
            return f"with one fewer engines would have lost {loss:.0%} of a step at most"
        return None

    def _change(self, level: int) -> None:
        self.level, self.settling = level, level + 2  # the next step's prompts have been submitted
        self.with_fewer.clear()
        self.idle.clear()
        self.gains.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"level": self.level, "descends": self.descends}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at the level of a checkpoint, as far as the bound now allows; it settles anew."""
        self.descends = bool(state.get("descends", True))
        self._change(max(min(1, self.most), min(int(state["level"]), self.most)))
