"""Virtual time: engines, the trainer's computation and timers go on together until the next thing happens.

Invariants: time never goes back; what a device did between two events is one kind, counted at once; a call
is in one engine, in the queue, or with a tool. Host work on the devices' own time slows all of them alike.
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


class World:
    """`on_ended` is told of each call that has ended; `priority` orders the queue, smallest first."""

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
        self.work = 0.0  # seconds of computation left on each train device
        self.syncing = False
        self._queue: list[tuple[tuple[int, ...], int, SimulatedSample]] = []
        self._timers: list[tuple[float, int, Action]] = []
        self._order = count()

    @property
    def computing(self) -> bool:
        return self.work > 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def after(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._order), action))

    def enqueue(self, sample: SimulatedSample) -> None:
        order = next(self._order)
        heapq.heappush(self._queue, (self.priority(sample, order), order, sample))

    def forget(self, samples: set[SimulatedSample]) -> None:
        """Drop calls wherever they are."""
        for device in self.devices:
            device.engine.drop(samples, self.version)
        self._queue = [entry for entry in self._queue if entry[2] not in samples]
        heapq.heapify(self._queue)

    def place(self) -> None:
        """Give waiting calls to the least loaded engine with a seat."""
        while self._queue:
            seats = [d for d in self.devices if d.serving and d.engine.running < d.engine.seats]
            if not seats or self.syncing:
                return
            chosen = min(seats, key=lambda d: (d.engine.running / d.engine.seats, d.name))
            chosen.engine.add(heapq.heappop(self._queue)[2], self.version, prefill_token_s=self.machine.prefill_token_s)

    def switch(self, device: SimulatedDevice, use: Use, *, carry: bool) -> None:
        """Begin a switch; what the engine ran is frozen in it, or carried back to the queue."""
        if carry:
            self.cut(device)
        to_rollout = use is Use.ROLLOUT
        seconds = self.machine.switch_to_rollout_s if to_rollout else self.machine.switch_to_train_s
        device.use, device.switching_until = use, self.now + seconds
        self.after(seconds, lambda: setattr(device, "switching_until", None))

    def cut(self, device: SimulatedDevice) -> None:
        """Take its calls off a device; they come back to the queue when they have been carried over."""
        for sample in device.engine.cut(self.version):
            self.after(self.carry_s, lambda sample=sample: self.enqueue(sample))  # type: ignore[misc]

    def commit(self, version: int) -> None:
        """New weights: tokens from here on are of `version`."""
        for device in self.devices:
            device.engine.settle(self.version)
        self.version = version

    def rate(self, device: SimulatedDevice) -> float:
        """Tokens/s if its engine ran alone on the machine."""
        return self.machine.rate(device.engine.running) if device.serving and not self.syncing else 0.0

    def speed(self) -> float:
        """Share of the devices' time that host work leaves them, 0 to 1."""
        tokens = sum(self.rate(device) for device in self.devices)
        return 1 / (1 + self.machine.host_token_s * tokens / len(self.devices))

    def advance(self) -> None:
        """Go on to the next event and let it happen. Raises RuntimeError when there is none."""
        speed, seconds = self.speed(), self._timers[0][0] - self.now if self._timers else float("inf")
        if self.computing:
            seconds = min(seconds, self.work / speed)
        generating = [device for device in self.devices if self.rate(device) > 0]
        stalled = [device.engine for device in generating if device.engine.stalled_s > 0]
        paces = [(d, speed / self.machine.decode_s(d.engine.running)) for d in generating if not d.engine.stalled_s]
        for device, pace in paces:
            seconds = min(seconds, device.engine.steps_to_next_end() / pace)
        for engine in stalled:
            seconds = min(seconds, engine.stalled_s / speed)
        if seconds == float("inf"):
            raise RuntimeError(f"nothing happens any more after {self.now:.3f} s")
        self._pass(max(0.0, seconds), speed)
        for engine in stalled:
            left = engine.stalled_s - max(0.0, seconds) * speed
            engine.stalled_s = left if left > NEARLY else 0.0
        for device, pace in paces:
            device.engine.advance(max(0.0, seconds) * pace)
            for sample in device.engine.ended(self.version):
                self.on_ended(sample)
        while self._timers and self._timers[0][0] <= self.now + NEARLY:
            heapq.heappop(self._timers)[2]()

    def _pass(self, seconds: float, speed: float) -> None:
        for device in self.devices:
            device.seconds[device.kind(computing=self.computing, syncing=self.syncing)] += seconds
        self.now += seconds
        if self.computing:
            left = self.work - seconds * speed
            self.work = left if left > NEARLY else 0.0
