"""What a policy learns from views: an engine's rate by its running calls, and how fast groups finish.

Lending by marginal gain: a device generates as long as that is worth more than taking it and giving it back.

Both sides are counted in device-seconds. Lending a device for t seconds saves (t - switch to rollout) times
its efficiency, the rate at the calls it would run as a share of its full rate: that much generation need not
be done later. It is worth nothing when no call waits, none is frozen on the device and the staleness bound
has no room for a prompt. It costs the switch back, for which all train devices wait, since an update needs
them together; further devices switch back at the same time, at no further cost. The switch to rollout falls
into time that would be idle, so that it only shortens t.

Invariants: a device is lent only for more than `1 + hysteresis` times its cost; it is taken back when it is
due or has nothing to run, and never because an estimate moved; between two changes of a device's use there
are at least `dwell` round trips, unless a mini-batch is due or nobody else would generate.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from seamless_verl.errors import ConfigError
from seamless_verl.resources.lending.policy import (
    Assignment,
    Deciding,
    DeviceView,
    LendingReason,
    LendingView,
    Tag,
    Use,
    others_generate,
)

WEIGHT = 0.1  # of a new measurement in a moving average


def averaged(old: float | None, new: float, weight: float = WEIGHT) -> float:
    """The exponentially weighted moving average after one more measurement."""
    return new if old is None else old + weight * (new - old)


class RateCurve:
    """Tokens/s at c running calls: moving averages in buckets of powers of two, straight lines between them.

    Below the smallest bucket measured the rate is taken as proportional, above the largest as constant;
    with nothing measured, as proportional throughout.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float]] = {}  # bucket -> mean calls, mean rate

    def observe(self, calls: int, rate: float) -> None:
        """One measurement; an engine that stands still says nothing."""
        if calls > 0 and rate > 0:
            bucket = calls.bit_length()
            at, mean = self._points.get(bucket, (None, None))
            self._points[bucket] = (averaged(at, calls), averaged(mean, rate))

    def at(self, calls: float) -> float:
        """The rate to expect, tokens/s."""
        points = [(0.0, 0.0), *(self._points[bucket] for bucket in sorted(self._points))]
        if len(points) == 1:
            return float(calls)
        for (c0, r0), (c1, r1) in pairwise(points):
            if calls <= c1:
                return r0 + (r1 - r0) * (calls - c0) / (c1 - c0)
        return points[-1][1]

    def efficiency(self, calls: float, seats: int) -> float:
        """The rate at `calls` as a share of that with every seat taken, 0 to 1."""
        full = max(self.at(seats), self.at(calls))
        return self.at(calls) / full if full > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {str(bucket): list(point) for bucket, point in self._points.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._points = {int(bucket): (float(at), float(rate)) for bucket, (at, rate) in state.items()}


class GroupPace:
    """Seconds of generation between two finished groups; time in which no engine ran does not count."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._seen: int | None = None
        self._now = 0.0
        self._elapsed = 0.0
        self._generating = False

    def observe(self, now: float, finished: int, generating: bool) -> None:
        if self._generating:
            self._elapsed += now - self._now
        if self._seen is not None and finished > self._seen and self._elapsed > 0:
            self.seconds = averaged(self.seconds, self._elapsed / (finished - self._seen))
            self._elapsed = 0.0
        self._now, self._seen, self._generating = now, finished, generating

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: state[name] for name in vars(self)})


Chosen = dict[str, Assignment]


class Marginal(Deciding):
    """`hysteresis` is a share of the cost, `dwell` counts round trips, `overhead` is a share of training time.

    Where the round trip is more than `overhead` of the training it is made for, mini-batches are collected, at
    most a step's, as long as the trip saved is more than what the engines lose by running below their full rate.
    """

    def __init__(self, *, hysteresis: float = 0.5, dwell: float = 2.0, overhead: float = 0.1) -> None:
        super().__init__()
        for key, value in (("hysteresis", hysteresis), ("dwell", dwell), ("overhead", overhead)):
            if value < 0:
                raise ConfigError(key, value, "it cannot be negative", f"Give {key} 0 or more")
        self.hysteresis, self.dwell, self.overhead = hysteresis, dwell, overhead
        self._curve, self._pace = RateCurve(), GroupPace()
        self._changed: dict[str, float] = {}

    def _choose(self, view: LendingView, lendable: tuple[DeviceView, ...]) -> Chosen:
        self._learn(view)
        if self._due(view) and not self._collects(view, lendable):
            return {d.device_id: Assignment(Use.TRAIN, LendingReason.DUE) for d in lendable}
        chosen = {d.device_id: self._stay(view, d) for d in lendable if d.use is Use.ROLLOUT}
        kept = any(said.use is Use.ROLLOUT for said in chosen.values())
        return chosen | self._lend(view, [d for d in lendable if d.use is Use.TRAIN], kept=kept)

    def _learn(self, view: LendingView) -> None:
        for device in view.devices:
            self._curve.observe(device.running, device.rate)
        self._pace.observe(view.now, view.demand.finished, any(device.rate > 0 for device in view.devices))

    @staticmethod
    def _due(view: LendingView) -> bool:
        """Now, or so soon that a switch begun now ends just in time."""
        return view.due_in_s is not None and view.due_in_s <= view.costs.switch_to_train_s

    def _collects(self, view: LendingView, lendable: tuple[DeviceView, ...]) -> bool:
        """Whether to wait for one more mini-batch although one is due, which saves a round trip."""
        demand, lent = view.demand, [d for d in lendable if d.use is Use.ROLLOUT]
        if not lent or self._pace.seconds is None or demand.ready >= demand.left_in_step:
            return False
        trip = view.costs.switch_to_rollout_s + view.costs.switch_to_train_s
        training = demand.ready // demand.needed * view.costs.train_s
        efficiency = sum(self._curve.efficiency(min(d.running, d.seats), d.seats) for d in lent) / len(lent)
        lost = (1 - efficiency) * self._pace.seconds * demand.needed
        return trip > self.overhead * training and trip > lost

    def _stay(self, view: LendingView, device: DeviceView) -> Assignment:
        if device.running or view.demand.waiting or view.demand.room:
            due = view.due_in_s is not None and view.due_in_s <= view.costs.switch_to_train_s
            return Assignment(Use.ROLLOUT, LendingReason.AMORTIZE if due else LendingReason.GAIN)
        if self._recent(view, device):
            return Assignment(Use.ROLLOUT, LendingReason.RECENT)
        return Assignment(Use.TRAIN, LendingReason.EMPTY)

    def _lend(self, view: LendingView, here: list[DeviceView], *, kept: bool) -> Chosen:
        """The most valuable number of those with the trainer: gains add up, the delay of training is paid once."""
        ranked = sorted(here, key=lambda d: (-d.running, d.device_id))
        refused = {d.device_id: self._refusal(view, d) for d in ranked}
        needed = view.due_in_s is None and not kept and not others_generate(view)
        open_to = [d for d in ranked if needed or refused[d.device_id] is not LendingReason.RECENT]
        efficiencies = self._efficiencies(view, open_to)
        lent = sum(1 for e in efficiencies if e > 0)
        gain = self._usable_s(view) * sum(efficiencies) if lent else 0.0
        waits = sum(1 for d in view.devices if Tag.TRAIN in d.tags)
        price = 0.0 if kept else view.costs.switch_to_train_s * waits
        reason = (
            LendingReason.GAIN if gain > (1 + self.hysteresis) * price else LendingReason.NEEDED if needed else None
        )
        chosen = {d.device_id: Assignment(Use.TRAIN, refused[d.device_id]) for d in ranked}
        if reason is not None:
            chosen |= {d.device_id: Assignment(Use.ROLLOUT, reason) for d in open_to[:lent]}
        if view.demand.held:
            chosen |= {d.device_id: Assignment(Use.ROLLOUT, LendingReason.NEEDED) for d in ranked if d.urgent}
        return chosen

    def _refusal(self, view: LendingView, device: DeviceView) -> LendingReason:
        """Why a device would not be lent, unless it is."""
        if self._recent(view, device):
            return LendingReason.RECENT
        work = device.running or view.demand.waiting or view.demand.room
        return LendingReason.COST if work else LendingReason.EMPTY

    def _efficiencies(self, view: LendingView, ranked: list[DeviceView]) -> list[float]:
        """What each would produce with the calls it holds and an even share of those that wait, best first."""
        spare = view.demand.waiting + view.demand.room
        shares = [(spare + i) // len(ranked) for i in range(len(ranked))][::-1]
        return [
            self._curve.efficiency(min(d.running + more, d.seats), d.seats)
            for d, more in zip(ranked, shares, strict=True)
        ]

    def _usable_s(self, view: LendingView) -> float:
        """Seconds until the devices are needed again, less the switch to rollout."""
        return self._horizon_s(view) - view.costs.switch_to_rollout_s

    def _horizon_s(self, view: LendingView) -> float:
        if view.due_in_s is not None:
            return view.due_in_s
        if view.demand.held:
            return max((device.longest_s for device in view.devices), default=0.0)
        if view.trained == 0 or self._pace.seconds is None:
            return float("inf")  # nothing is known yet, nor anything to train
        return self._pace.seconds * max(0, view.demand.needed - view.demand.ready)

    def _recent(self, view: LendingView, device: DeviceView) -> bool:
        trip = view.costs.switch_to_rollout_s + view.costs.switch_to_train_s
        return view.now - self._changed.get(device.device_id, float("-inf")) < self.dwell * trip

    def _note(self, view: LendingView, device: DeviceView, said: Assignment) -> None:
        super()._note(view, device, said)
        if said.use is not device.use and said.reason is not LendingReason.DUE:
            self._changed[device.device_id] = view.now

    def state_dict(self) -> dict[str, Any]:
        mine = {"curve": self._curve.state_dict(), "pace": self._pace.state_dict(), "changed": dict(self._changed)}
        return super().state_dict() | mine

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._curve.load_state_dict(state["curve"])
        self._pace.load_state_dict(state["pace"])
        self._changed = {device: float(at) for device, at in state["changed"].items()}
