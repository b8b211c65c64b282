"""The marginal lending policy: lends a device as long as the gain is more than the cost of the two switches.

Devices of one engine are lent and reclaimed together: the rate is the engine's, and its devices gain alike.

Gain and cost are in device-seconds. Lending a device for t seconds saves (t - switch to rollout) times its
efficiency, the rate at the calls it would run as a share of its full rate: that much generation need not be done
later. The cost is the switch back, for which all train devices wait, since an update needs them together; further
devices switch back at the same time. The switch to rollout happens in time that would be idle, and only shortens t.

Invariants:
- A device is lent only for more than `1 + HYSTERESIS` times its cost, unless no other device would generate, or a
  call that others wait for is frozen on it.
- A device is reclaimed when it is due or has nothing to run, never because an estimate changed.
- Between two changes of a device's use are at least `DWELL` round trips, unless a mini-batch is due or no other
  device would generate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from seamless_verl.resources.lending.policy import (
    Assignment,
    BasePolicy,
    DeviceView,
    LendingReason,
    LendingView,
    Tag,
    Use,
    engines_of,
    fixed_devices_generate,
    rollout_only_devices,
)

WEIGHT = 0.1  # of a new measurement in a moving average
HYSTERESIS = 0.5  # share of a cost by which a gain must be more
DWELL = 2.0  # round trips
OVERHEAD = 0.1  # share of training time
MEMORY_S = 9.0  # a rate is the mean of so many seconds before, and of the newest measurement


def moving_average(old: float | None, new: float) -> float:
    """The exponentially weighted moving average after one more measurement."""
    return new if old is None else old + WEIGHT * (new - old)


class RateCurve:
    """Tokens/s at c running calls: means in buckets of powers of two, straight lines between them.

    Below the smallest bucket measured the rate is taken as proportional, above the largest as constant;
    with nothing measured, as proportional throughout.
    """

    def __init__(self) -> None:
        self._points: dict[int, tuple[float, float, float]] = {}  # bucket -> mean calls, mean rate, seconds of both

    def observe(self, calls: int, rate: float, seconds: float = 1.0) -> None:
        """Adds the mean rate of so many seconds, zero too: calls may report many tokens at once, and then none.

        Without calls there is nothing to learn.
        """
        if calls > 0 and seconds > 0:
            at, mean, before = self._points.get(calls.bit_length(), (0.0, 0.0, 0.0))
            together = min(before, MEMORY_S) + seconds
            weight = seconds / together
            self._points[calls.bit_length()] = (at + weight * (calls - at), mean + weight * (rate - mean), together)

    def at(self, calls: float) -> float:
        """The rate to expect, tokens/s."""
        points = [(0.0, 0.0), *(self._points[bucket][:2] for bucket in sorted(self._points))]
        if len(points) == 1:
            return float(calls)
        for (c0, r0), (c1, r1) in pairwise(points):
            if calls <= c1:
                return r0 + (r1 - r0) * (calls - c0) / (c1 - c0)
        return points[-1][1]

    def efficiency(self, calls: float, slots: int) -> float:
        """The rate at `calls` as a share of that with every slot taken, 0 to 1."""
        full = max(self.at(slots), self.at(calls))
        return self.at(calls) / full if full > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {str(bucket): list(point) for bucket, point in self._points.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._points = {int(bucket): (float(at), float(rate), float(s)) for bucket, (at, rate, s) in state.items()}


class GroupInterval:
    """Seconds of generation between two finished groups, a moving average.

    `generates` says whether any device does from now on; time in which none does is not counted.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._seen: int | None = None
        self._now = 0.0
        self._elapsed = 0.0
        self._generating = False

    def generates(self, generating: bool) -> None:
        self._generating = generating

    def observe(self, now: float, finished: int) -> None:
        if self._generating:
            self._elapsed += now - self._now
        if self._seen is not None and finished > self._seen and self._elapsed > 0:
            self.seconds = moving_average(self.seconds, self._elapsed / (finished - self._seen))
            self._elapsed = 0.0
        self._now, self._seen = now, finished

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: state[name] for name in vars(self)})


Assignments = dict[str, Assignment]
EngineDevices = tuple[DeviceView, ...]  # the devices of one engine


class Marginal(BasePolicy):
    """Lends as long as that gains. A round trip is a switch each way: where it takes more than OVERHEAD of the training
    it is made for, the policy waits for further mini-batches, at most a step's, as long as the trip saved is more than
    what the engines lose by running below their full rate."""

    def __init__(self) -> None:
        super().__init__()
        self._rate_curve, self._group_interval = RateCurve(), GroupInterval()
        self._changed_at: dict[str, float] = {}

    def _choose(self, view: LendingView, lendable: tuple[DeviceView, ...]) -> Assignments:
        self._learn(view)
        chosen = self._assignments(view, lendable)
        lent = [device for device in lendable if chosen[device.device_id].use is Use.ROLLOUT]
        self._group_interval.generates(any(device.slots for device in (*lent, *rollout_only_devices(view))))
        return chosen

    def _assignments(self, view: LendingView, lendable: tuple[DeviceView, ...]) -> Assignments:
        if self._due(view) and not self._waits_for_more(view, lendable):
            return {d.device_id: Assignment(Use.TRAIN, LendingReason.DUE) for d in lendable}
        chosen = {d.device_id: self._keep_or_return(view, d) for d in lendable if d.use is Use.ROLLOUT or not d.slots}
        kept = any(d.slots and chosen[d.device_id].use is Use.ROLLOUT for d in lendable if d.device_id in chosen)
        with_trainer = engines_of(d for d in lendable if d.use is Use.TRAIN and d.slots)
        return chosen | self._lend(view, with_trainer, kept=kept)

    def _learn(self, view: LendingView) -> None:
        for device, *_ in engines_of(view.devices):
            if device.rate > 0:  # else it does not generate, or nothing was measured yet
                self._rate_curve.observe(device.running, device.rate)
        self._group_interval.observe(view.now, view.demand.finished)

    @staticmethod
    def _due(view: LendingView) -> bool:
        """Whether a mini-batch is due now, or so soon that a switch begun now ends just in time."""
        return view.due_in_s is not None and view.due_in_s <= view.costs.switch_to_train_s

    def _waits_for_more(self, view: LendingView, lendable: tuple[DeviceView, ...]) -> bool:
        """Whether to wait for one more mini-batch although one is due, to save a round trip."""
        demand, lent_devices = view.demand, [d for d in lendable if d.use is Use.ROLLOUT and d.slots]
        if not lent_devices or self._group_interval.seconds is None or demand.ready >= demand.left_in_step:
            return False
        trip = view.costs.round_trip_s
        training = demand.ready // demand.needed * view.costs.train_s
        efficiencies = [self._rate_curve.efficiency(min(d.running, d.slots), d.slots) for d in lent_devices]
        efficiency = sum(efficiencies) / len(efficiencies)
        lost = (1 - efficiency) * self._group_interval.seconds * demand.needed
        return trip > OVERHEAD * training and trip > lost

    def _keep_or_return(self, view: LendingView, device: DeviceView) -> Assignment:
        if not device.slots:
            return Assignment(device.use, LendingReason.EMPTY)  # its replica is dead, and nobody hands it over
        if device.running or view.demand.waiting or view.demand.coming:
            return Assignment(Use.ROLLOUT, LendingReason.AMORTIZE if self._due(view) else LendingReason.GAIN)
        if self._changed_recently(view, device):
            return Assignment(Use.ROLLOUT, LendingReason.RECENT)
        return Assignment(Use.TRAIN, LendingReason.EMPTY)

    def _lend(self, view: LendingView, with_trainer: Sequence[EngineDevices], *, kept: bool) -> Assignments:
        """Which of the engines with the trainer to lend: the gains of their devices add up, the delay counts once."""
        ranked = sorted(with_trainer, key=lambda engine: (-engine[0].running, engine[0].device_id))
        refused = {d.device_id: self._refusal(view, d) for engine in ranked for d in engine}
        nobody_else_generates = view.due_in_s is None and not kept and not fixed_devices_generate(view)
        open_to = [
            engine
            for engine in ranked
            if nobody_else_generates or all(refused[d.device_id] is not LendingReason.RECENT for d in engine)
        ]
        efficiencies = self._efficiencies(view, open_to)
        useful = [d for engine, e in zip(open_to, efficiencies, strict=True) for d in engine if e > 0]
        devices = sum(e * len(engine) for engine, e in zip(open_to, efficiencies, strict=True))
        usable_s = self._horizon_s(view) - view.costs.switch_to_rollout_s
        gain = usable_s * devices if useful else 0.0
        waits = sum(1 for d in view.devices if Tag.TRAIN in d.tags)
        price = 0.0 if kept else view.costs.switch_to_train_s * waits
        reason = LendingReason.NEEDED if nobody_else_generates else None
        if gain > (1 + HYSTERESIS) * price:
            reason = LendingReason.GAIN
        chosen = {name: Assignment(Use.TRAIN, why) for name, why in refused.items()}
        if reason is not None:
            chosen |= {d.device_id: Assignment(Use.ROLLOUT, reason) for d in useful}
        if view.demand.held:
            urgent = [d for engine in ranked for d in engine if d.urgent]
            chosen |= {d.device_id: Assignment(Use.ROLLOUT, LendingReason.NEEDED) for d in urgent}
        return chosen

    def _refusal(self, view: LendingView, device: DeviceView) -> LendingReason:
        """Why a device would not be lent, unless it is."""
        if self._changed_recently(view, device):
            return LendingReason.RECENT
        work = device.running or view.demand.waiting or view.demand.coming
        return LendingReason.COST if work else LendingReason.EMPTY

    def _efficiencies(self, view: LendingView, ranked: Sequence[EngineDevices]) -> list[float]:
        """The efficiency of each engine with the calls it holds and an even share of those that wait, best first."""
        spare = view.demand.waiting + view.demand.coming
        shares = [(spare + i) // len(ranked) for i in range(len(ranked))][::-1]
        return [
            self._rate_curve.efficiency(min(engine[0].running + more, engine[0].slots), engine[0].slots)
            for engine, more in zip(ranked, shares, strict=True)
        ]

    def _horizon_s(self, view: LendingView) -> float:
        """Seconds until the devices are needed again."""
        if view.due_in_s is not None:
            return view.due_in_s
        if view.demand.held:
            return max((device.longest_s for device in view.devices), default=0.0)
        if view.trained == 0 or self._group_interval.seconds is None:
            return float("inf")  # nothing was measured yet, and there is nothing to train
        return self._group_interval.seconds * max(0, view.demand.needed - view.demand.ready)

    def _changed_recently(self, view: LendingView, device: DeviceView) -> bool:
        trip = view.costs.round_trip_s
        return view.now - self._changed_at.get(device.device_id, float("-inf")) < DWELL * trip

    def _record_change(self, view: LendingView, device: DeviceView, assignment: Assignment) -> None:
        super()._record_change(view, device, assignment)
        if assignment.use is not device.use and assignment.reason is not LendingReason.DUE:
            self._changed_at[device.device_id] = view.now

    def state_dict(self) -> dict[str, Any]:
        own = {
            "curve": self._rate_curve.state_dict(),
            "pace": self._group_interval.state_dict(),
            "changed": dict(self._changed_at),
        }
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rate_curve.load_state_dict(state["curve"])
        self._group_interval.load_state_dict(state["pace"])
        self._changed_at = {device: float(at) for device, at in state["changed"].items()}
