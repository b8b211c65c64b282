"""A cluster in virtual time: engines, the trainer's computation and timers advance together to the next event.

Two clocks run: `now`, in which timers are set, and `worked`, the seconds of their full speed that devices have had.
Where the host's work is done on the devices' own cores, it takes those that are idle first. What is left of it slows
all that compute alike: `worked` falls behind then. An engine is looked at only when something about it changes; what it
did since follows from its speed.

Invariants: time never goes back; what a device did between two events is of one kind, counted once; a call is in
one engine, in the queue, on its way there after a cut, or with a tool; `_loads` has each device that takes calls,
under the calls it runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count

from seamless_verl.resources.lending.policy import Use
from seamless_verl.tools.simulator.engine import SimulatedDevice, SimulatedEngine, SimulatedSample, SimulatedUse
from seamless_verl.tools.simulator.machine import MachineProfile

Action = Callable[[], None]
NEARLY = 1e-12  # seconds
BUSY = frozenset({SimulatedUse.TRAIN, SimulatedUse.ROLLOUT, SimulatedUse.SYNC})  # kinds in which a device computes


class VirtualCluster:
    """`on_ended` is called with each call that has ended; `priority` orders the queue, smallest first.

    `changed` is set where something has happened that may matter to a lending policy.
    """

    def __init__(
        self,
        machine: MachineProfile,
        devices: list[SimulatedDevice],
        *,
        on_ended: Callable[[SimulatedSample], None],
        priority: Callable[[SimulatedSample, int], tuple[int, ...]],
        carry_s: float,
    ) -> None:
        self.machine, self.devices, self.carry_s = machine, devices, carry_s
        self.on_ended, self.priority = on_ended, priority
        self.now = self.worked = 0.0
        self.version = 0
        self.syncing = self.computing = False
        self.changed = True
        self._queue: list[tuple[tuple[int, ...], int, SimulatedSample]] = []
        self._cut_calls: set[SimulatedSample] = set()  # on their way to the queue
        self._timers: list[tuple[float, int, Action]] = []
        self._ends: list[tuple[float, int, SimulatedDevice | Action, int]] = []  # by `worked`
        self._order = count()
        most = max(device.engine.seats for device in devices)
        self.step_s = [0.0, *(machine.decode_s(calls) for calls in range(1, most + 1))]  # of a decoding step, by calls
        self._loads: list[dict[str, SimulatedDevice]] = [{} for _ in self.step_s]
        self._places: dict[str, int] = {}
        self._rate = 0.0  # tokens/s of all engines
        self._busy = 0  # devices that compute
        self._helped_until = 0.0  # by `worked`
        for device in devices:
            self.update(device)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._order), action))

    def enqueue(self, sample: SimulatedSample) -> None:
        order = next(self._order)
        self.changed = self.changed or not self._queue
        heapq.heappush(self._queue, (self.priority(sample, order), order, sample))

    def drop_samples(self, samples: set[SimulatedSample]) -> None:
        """Drop calls in engines, in the queue, and on their way to it."""
        for device in self.devices:
            device.engine.count_up_to(self.worked)
            device.engine.drop(samples)
            self.update(device)
        self._cut_calls -= samples
        self._queue = [entry for entry in self._queue if entry[2] not in samples]
        heapq.heapify(self._queue)

    def place_waiting(self) -> None:
        """Give waiting calls to the least loaded engine with a free seat."""
        if self.syncing:
            return
        changed: dict[str, SimulatedDevice] = {}
        while self._queue and (device := self._least_loaded()):
            if device.name not in changed:
                changed[device.name] = device
                device.engine.count_up_to(self.worked)
            device.engine.add(heapq.heappop(self._queue)[2])
            self._place(device)
        for device in changed.values():
            self.update(device)

    def _least_loaded(self) -> SimulatedDevice | None:
        """Of all with a free seat; of equally loaded ones the one that has been so for the longest time."""
        return next((next(iter(load.values())) for load in self._loads if load), None)

    def switch(self, device: SimulatedDevice, use: Use, *, carry: bool) -> None:
        """Begin a switch; the engine's calls are frozen in it or, with `carry`, moved back to the queue."""
        if carry:
            self.cut(device)
        machine = self.machine
        seconds = machine.switch_to_rollout_s if use is Use.ROLLOUT else machine.switch_to_train_s
        device.use, device.switching_until = use, self.now + seconds
        self.update(device)
        self.after(seconds, lambda: self._end_switch(device))

    def _end_switch(self, device: SimulatedDevice) -> None:
        device.switching_until, self.changed = None, True
        self.update(device)

    def cut(self, device: SimulatedDevice) -> None:
        """Cut a device's calls; they are in the queue again after `carry_s`."""
        device.engine.count_up_to(self.worked)
        if calls := device.engine.cut():
            self._cut_calls.update(calls)
            self.after(self.carry_s, lambda: self._enqueue_cut(calls))
        self.update(device)

    def _enqueue_cut(self, calls: list[SimulatedSample]) -> None:
        for sample in calls:
            if sample in self._cut_calls:  # it may be dropped meanwhile
                self._cut_calls.remove(sample)
                self.enqueue(sample)

    def begin_computation(self, seconds: float) -> None:
        """Let the trainer's devices compute for so long."""
        self._after_work(seconds, lambda: self._set_computing(False))
        self._set_computing(True)

    def _set_computing(self, computing: bool) -> None:
        self.computing, self.changed = computing, True
        for device in self.devices:
            if device.trains:
                self._update_kind(device)

    def after_helpers(self, action: Action) -> None:
        """Do it once the host has done its work on a call that has ended now, and all that it had to do before."""
        if not self.machine.host_shares:
            action()
            return
        self._helped_until = max(self.worked, self._helped_until) + self.machine.host_sample_s
        self._after_work(self._helped_until - self.worked, action)

    def _after_work(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._ends, (self.worked + seconds, next(self._order), action, 0))

    def set_syncing(self, syncing: bool) -> None:
        """Begin or end a weight update, during which no engine generates."""
        if self.syncing is syncing:
            return
        self.syncing, self.changed = syncing, True
        for device in self.devices:
            self.update(device)

    def commit(self, version: int, *, load_s: float = 0.0) -> None:
        """Commit new weights: tokens from now on are of `version`, after engines have stopped for `load_s`."""
        for device in self.devices:
            device.engine.count_up_to(self.worked)
            device.engine.commit(version)
            device.engine.stalled_s += load_s
            self.update(device)
        self.version, self.changed = version, True

    def update(self, device: SimulatedDevice) -> None:
        """After a change of what a device does: its kind of use from now on, its speed, and its next event."""
        engine = device.engine
        engine.count_up_to(self.worked)
        running = engine.running
        self._update_kind(device)
        engine.step_s = self._decode_s(engine) if running and device.serving and not self.syncing else 0.0
        rate = running / engine.step_s if engine.step_s else 0.0
        self._rate, device.rate = self._rate + rate - device.rate, rate
        device.changes += 1
        if rate:
            end = self.worked + engine.stalled_s + engine.steps_to_next_end() * engine.step_s
            heapq.heappush(self._ends, (end, next(self._order), device, device.changes))
        self._place(device)

    def _place(self, device: SimulatedDevice) -> None:
        """Under the calls that it runs, if it takes more."""
        self._loads[self._places.pop(device.name, 0)].pop(device.name, None)
        running = device.engine.running
        if device.serving and running < device.engine.seats:
            self._loads[running][device.name] = device
            self._places[device.name] = running

    def _update_kind(self, device: SimulatedDevice) -> None:
        device.count_up_to(self.now)
        self._busy -= device.kind in BUSY
        device.kind = device.kind_now(computing=self.computing, syncing=self.syncing)
        self._busy += device.kind in BUSY

    def _decode_s(self, engine: SimulatedEngine) -> float:
        """Seconds of a decoding step, on the mean until the next call ends: contexts grow."""
        seconds = self.step_s[engine.running]
        if cost := self.machine.context_token_s:
            growth = engine.running * engine.steps_to_next_end() / 2
            seconds += cost * max(0.0, engine.context + growth - engine.running * self.machine.rates_context)
        return seconds

    def count_up_to_now(self, devices: Iterable[SimulatedDevice]) -> None:
        """Count the steps of their engines, and their own time, up to now."""
        for device in devices:
            device.engine.count_up_to(self.worked)
            device.count_up_to(self.now)

    def speed(self) -> float:
        """Share of its core that a device which computes gets beside the host's work, 0 to 1."""
        behind = self._helped_until > self.worked + NEARLY  # then there is more to do than is done at once
        wanted = self._busy + (1.0 if behind else min(1.0, self._host_work))
        return min(1.0, len(self.devices) / wanted) if self.machine.host_shares and wanted else 1.0

    @property
    def _host_work(self) -> float:
        """Seconds of the host's work that a second of generation makes."""
        return self.machine.host_token_s * max(0.0, self._rate)

    def _seconds_until_helped(self) -> float:
        """Until the host has done all that it has to do, in seconds of `worked`; infinite where nothing is left."""
        behind = self._helped_until - self.worked
        return behind / (1 - self._host_work) if behind > NEARLY and self._host_work < 1 else float("inf")

    def advance(self) -> None:
        """Advance to the next event and apply it. Raises RuntimeError when there is none."""
        self._forget_outdated()
        speed = self.speed()
        to_end = (self._ends[0][0] - self.worked) / speed if self._ends else float("inf")
        to_timer = self._timers[0][0] - self.now if self._timers else float("inf")
        seconds = max(0.0, min(to_end, to_timer))
        if seconds == float("inf"):
            raise RuntimeError(f"nothing happens any more after {self.now:.3f} s")
        if self.machine.host_shares and (until := self._seconds_until_helped() / speed) < seconds:
            self._pass_time(until, until * speed)
            return
        to_worked = self._ends[0][0] if to_end <= to_timer else self.worked + seconds * speed
        self._pass_time(seconds, to_worked - self.worked)
        self.now = self._timers[0][0] if to_timer <= to_end else self.now
        while self._ends and self._ends[0][0] <= self.worked + NEARLY:
            _, _, what, changes = heapq.heappop(self._ends)
            if not isinstance(what, SimulatedDevice):
                what()
            elif what.changes == changes:
                self._end_calls(what)
        while self._timers and self._timers[0][0] <= self.now + NEARLY:
            heapq.heappop(self._timers)[2]()

    def _pass_time(self, seconds: float, work: float) -> None:
        """`work` are seconds of full speed. The host falls behind while generation makes more work than it can do."""
        self.now += seconds
        self._helped_until = max(self.worked + work, self._helped_until + self._host_work * work)
        self.worked += work

    def _forget_outdated(self) -> None:
        while self._ends and isinstance(what := self._ends[0][2], SimulatedDevice) and what.changes != self._ends[0][3]:
            heapq.heappop(self._ends)

    def _end_calls(self, device: SimulatedDevice) -> None:
        device.engine.count_up_to(self.worked)
        for sample in device.engine.ended():
            self.on_ended(sample)
        self.changed = self.changed or not device.engine.running
        self.update(device)
