"""A cluster in virtual time: engines, the trainer's computation and timers advance together to the next event.

Invariants: time never goes back; what a device did between two events is of one kind, counted once; a call is in
one engine, in the queue, or with a tool. Host work on the devices' own time slows all of them alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from seamless_verl.resources.lending import Use
from seamless_verl.simulator.engine import SimulatedDevice, SimulatedSample
from seamless_verl.simulator.scenario import MachineProfile

Action = Callable[[], None]
NEARLY = 1e-12  # seconds


class VirtualCluster:
    """`on_ended` is called with each call that has ended; `priority` orders the queue, smallest first."""

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
        self.now, self.version = 0.0, 0
        self.computation_s = 0.0  # of the current mini-batch, still to be done on each train device
        self.syncing = False
        self._queue: list[tuple[tuple[int, ...], int, SimulatedSample]] = []
        self._timers: list[tuple[float, int, Action]] = []
        self._order = count()

    @property
    def computing(self) -> bool:
        return self.computation_s > 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._order), action))

    def enqueue(self, sample: SimulatedSample) -> None:
        order = next(self._order)
        heapq.heappush(self._queue, (self.priority(sample, order), order, sample))

    def drop_samples(self, samples: set[SimulatedSample]) -> None:
        """Drop calls in engines and in the queue."""
        for device in self.devices:
            device.engine.drop(samples, self.version)
        self._queue = [entry for entry in self._queue if entry[2] not in samples]
        heapq.heapify(self._queue)

    def place_waiting(self) -> None:
        """Give waiting calls to the least loaded engine with a free seat."""
        while self._queue:
            seats = [d for d in self.devices if d.serving and d.engine.running < d.engine.seats]
            if not seats or self.syncing:
                return
            chosen = min(seats, key=lambda d: (d.engine.running / d.engine.seats, d.name))
            chosen.engine.add(heapq.heappop(self._queue)[2], self.version, prefill_token_s=self.machine.prefill_token_s)

    def switch(self, device: SimulatedDevice, use: Use, *, carry: bool) -> None:
        """Begin a switch; the engine's calls are frozen in it or, with `carry`, moved back to the queue."""
        if carry:
            self.cut(device)
        to_rollout = use is Use.ROLLOUT
        seconds = self.machine.switch_to_rollout_s if to_rollout else self.machine.switch_to_train_s
        device.use, device.switching_until = use, self.now + seconds
        self.after(seconds, lambda: setattr(device, "switching_until", None))

    def cut(self, device: SimulatedDevice) -> None:
        """Cut a device's calls; they are in the queue again after `carry_s`."""
        for sample in device.engine.cut(self.version):
            self.after(self.carry_s, lambda sample=sample: self.enqueue(sample))  # type: ignore[misc]

    def commit(self, version: int) -> None:
        """Commit new weights: tokens from now on are of `version`."""
        for device in self.devices:
            device.engine.count_produced(self.version)
        self.version = version

    def rate(self, device: SimulatedDevice) -> float:
        """Tokens/s of its engine without host work on the machine."""
        return self.machine.rate(device.engine.running) if device.serving and not self.syncing else 0.0

    def speed(self) -> float:
        """Share of the devices' time that host work leaves them, 0 to 1."""
        tokens = sum(self.rate(device) for device in self.devices)
        return 1 / (1 + self.machine.host_token_s * tokens / len(self.devices))

    def advance(self) -> None:
        """Advance to the next event and apply it. Raises RuntimeError when there is none."""
        speed, seconds = self.speed(), self._timers[0][0] - self.now if self._timers else float("inf")
        if self.computing:
            seconds = min(seconds, self.computation_s / speed)
        generating = [device for device in self.devices if self.rate(device) > 0]
        stalled = [device.engine for device in generating if device.engine.stalled_s > 0]
        step_rates = [
            (d, speed / self.machine.decode_s(d.engine.running)) for d in generating if not d.engine.stalled_s
        ]
        for device, step_rate in step_rates:
            seconds = min(seconds, device.engine.steps_to_next_end() / step_rate)
        for engine in stalled:
            seconds = min(seconds, engine.stalled_s / speed)
        if seconds == float("inf"):
            raise RuntimeError(f"nothing happens any more after {self.now:.3f} s")
        self._pass_time(max(0.0, seconds), speed)
        for engine in stalled:
            remaining = engine.stalled_s - max(0.0, seconds) * speed
            engine.stalled_s = remaining if remaining > NEARLY else 0.0
        for device, step_rate in step_rates:
            device.engine.advance(max(0.0, seconds) * step_rate)
            for sample in device.engine.ended(self.version):
                self.on_ended(sample)
        while self._timers and self._timers[0][0] <= self.now + NEARLY:
            heapq.heappop(self._timers)[2]()

    def _pass_time(self, seconds: float, speed: float) -> None:
        for device in self.devices:
            device.seconds[device.kind(computing=self.computing, syncing=self.syncing)] += seconds
        self.now += seconds
        if self.computing:
            remaining = self.computation_s - seconds * speed
            self.computation_s = remaining if remaining > NEARLY else 0.0
