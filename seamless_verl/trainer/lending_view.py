"""What a lending policy sees of a run: devices from what the data planes observe, and how far training is.

Owned state: when each replica began to generate and its tokens then, from which its rate follows, and the speed of one
call on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from seamless_verl.resources.lending.marginal import moving_average
from seamless_verl.resources.lending.policy import Demand, DeviceView, Tag, Use
from seamless_verl.rollout.observation import ReplicaLoad, RolloutObservation

MEASURED_S = 1.0  # the shortest time over which a rate is measured: calls report their tokens in pieces
BOTH, TRAIN, ROLLOUT = frozenset({Tag.TRAIN, Tag.ROLLOUT}), frozenset({Tag.TRAIN}), frozenset({Tag.ROLLOUT})
Observe = Callable[[Sequence[str]], RolloutObservation]


@dataclass(frozen=True)
class TrainingProgress:
    """How far training is: what it waits for, and how many mini-batches it has taken, in all and in this step.

    `late` are the prompts whose groups hold training back; `unfinished` counts the sessions of all that generate, those
    that ended before the last of their group among them.
    """

    demand: Demand
    trained: int
    update: int
    late: tuple[str, ...] = ()
    unfinished: int = 0


@dataclass(frozen=True)
class RunDevices:
    """The devices of a run, named as in the ledger: `shared` and `rollout` by replica, and all that train."""

    shared: dict[str, tuple[str, ...]]
    rollout: dict[str, tuple[str, ...]]
    training: tuple[str, ...]


class ReplicaRates:
    """Tokens/s of each replica, measured while it generates, and tokens/s of one call on it."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[float, ReplicaLoad]] = {}  # the last look; only of replicas that generate
        self._rates: dict[str, float] = {}
        self._speeds: dict[str, float] = {}

    def measure(self, load: ReplicaLoad, now: float, *, generates: bool) -> None:
        """Looks at a replica, twice at least while it generates."""
        name = load.replica_id
        if not generates:
            self._since.pop(name, None)
            return
        began, before = self._since.setdefault(name, (now, load))
        if load.generated < before.generated:  # its data plane was restarted
            self._since[name] = (now, load)
        elif now - began >= MEASURED_S:
            rate = self._rates[name] = (load.generated - before.generated) / (now - began)
            self._since[name] = (now, load)
            if rate > 0 and (calls := before.running + load.running):
                self._speeds[name] = moving_average(self._speeds.get(name), rate / (calls / 2))

    def of(self, replica_id: str) -> float:
        """The rate that was measured last; 0 before."""
        return self._rates.get(replica_id, 0.0)

    def seconds(self, load: ReplicaLoad) -> float:
        """How long its longest call still takes; 0 where no call's speed is known."""
        speed = self._speeds.get(load.replica_id, 0.0)
        return load.longest / speed if speed else 0.0


class DeviceViews:
    """Makes the devices of a view from what the data planes observe."""

    def __init__(self, devices: RunDevices, observe: Observe) -> None:
        self.devices, self.observe = devices, observe
        self.rates = ReplicaRates()

    def look(
        self, reclaimed: set[str], progress: TrainingProgress, now: float
    ) -> tuple[tuple[DeviceView, ...], Demand]:
        """All devices, where training has those of `reclaimed` replicas, and the demand with the calls there are."""
        observation = self.observe(progress.late)
        self.measure(observation, reclaimed, now)
        views = [
            view
            for tags, replicas in ((BOTH, self.devices.shared), (ROLLOUT, self.devices.rollout))
            for name, devices in replicas.items()
            for view in self._views(observation.of(name), devices, tags, generates=name not in reclaimed)
        ]
        shared = {device for devices in self.devices.shared.values() for device in devices}
        views += [DeviceView(device, TRAIN, Use.TRAIN) for device in self.devices.training if device not in shared]
        running = sum(load.running for load in observation.replicas)
        demand = progress.demand
        coming = max(0, progress.unfinished - running - observation.waiting)
        return tuple(views), Demand(
            demand.ready,
            demand.needed,
            demand.left_in_step,
            held=bool(progress.late),
            waiting=observation.waiting,
            coming=coming,
            finished=observation.finished,
        )

    def measure(self, observation: RolloutObservation, reclaimed: set[str], now: float) -> None:
        """Measures the rates, without a view: also while all devices are lent and there is nothing to decide."""
        for name in (*self.devices.shared, *self.devices.rollout):
            self.rates.measure(observation.of(name), now, generates=name not in reclaimed)

    def _views(
        self, load: ReplicaLoad, devices: Sequence[str], tags: frozenset[Tag], *, generates: bool
    ) -> list[DeviceView]:
        rate = self.rates.of(load.replica_id) if generates else 0.0
        return [
            DeviceView(
                device,
                tags,
                Use.ROLLOUT if generates else Use.TRAIN,
                running=load.running,
                urgent=load.urgent,
                rate=rate,
                longest_s=self.rates.seconds(load),
                slots=load.slots,
                engine=load.replica_id,
            )
            for device in devices
        ]
