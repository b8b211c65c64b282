"""Lends the trainer's devices to generation between its computations, and reclaims them for each.

A device is handed over only between two computations, in the trainer's thread; the rollout manager has paused the
replicas before the trainer computes. The lending policy decides, from what was measured and what the data planes
observe, whether a gap is worth two hand-overs, and whether the calls of a reclaimed device go on elsewhere.
"""

from __future__ import annotations

import functools
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import KW_ONLY, dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import ray

from seamless_verl.resources.lending.marginal import moving_average
from seamless_verl.resources.lending.policy import (
    Costs,
    Decision,
    Demand,
    DeviceView,
    LendingPolicy,
    LendingView,
    Tag,
    Use,
)
from seamless_verl.rollout.observation import ReplicaLoad, RolloutObservation

if TYPE_CHECKING:
    from seamless_verl.data_plane.client import DataPlaneClient, PlacedReplica

MEASURED_S = 1.0  # the shortest time over which a rate is measured: calls report their tokens in pieces
BOTH, TRAIN, ROLLOUT = frozenset({Tag.TRAIN, Tag.ROLLOUT}), frozenset({Tag.TRAIN}), frozenset({Tag.ROLLOUT})
UPDATE = "update_actor"  # the last computation of a mini-batch
# Worker groups and their methods that compute on the trainer's devices and return when they have. The critic's do not
# wait: see `SeamlessTrainer._compute_values`.
COMPUTATIONS = {
    "actor_rollout_wg": ("compute_log_prob", UPDATE),
    "ref_policy_wg": ("compute_ref_log_prob",),
}
NOTHING: Mapping[str, Any] = MappingProxyType({})
T = TypeVar("T")


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


class DeviceViews:
    """Makes the devices of a policy's view from what the data planes observe.

    Owned state: when each replica that generates was looked at last and its load then, its tokens/s, and those of one
    call on it.
    """

    def __init__(self, devices: RunDevices, observe: Callable[[Sequence[str]], RolloutObservation]) -> None:
        self.devices, self.observe = devices, observe
        self._since: dict[str, tuple[float, ReplicaLoad]] = {}
        self._rates: dict[str, float] = {}
        self._speeds: dict[str, float] = {}

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
        demand = replace(
            progress.demand,
            held=bool(progress.late),
            waiting=observation.waiting,
            coming=max(0, progress.unfinished - running - observation.waiting),
            finished=observation.finished,
        )
        return tuple(views), demand

    def measure(self, observation: RolloutObservation, reclaimed: set[str], now: float) -> None:
        """Measures the rates, without a view: also while all devices are lent and there is nothing to decide."""
        for name in (*self.devices.shared, *self.devices.rollout):
            if name in reclaimed:
                self._since.pop(name, None)
            else:
                self._measure(observation.of(name), now)

    def _measure(self, load: ReplicaLoad, now: float) -> None:
        name = load.replica_id
        began, before = self._since.setdefault(name, (now, load))
        if load.generated < before.generated:  # its data plane was restarted
            self._since[name] = (now, load)
        elif now - began >= MEASURED_S:
            rate = self._rates[name] = (load.generated - before.generated) / (now - began)
            self._since[name] = (now, load)
            if rate > 0 and (calls := before.running + load.running):
                self._speeds[name] = moving_average(self._speeds.get(name), rate / (calls / 2))

    def _views(
        self, load: ReplicaLoad, devices: Sequence[str], tags: frozenset[Tag], *, generates: bool
    ) -> list[DeviceView]:
        speed = self._speeds.get(load.replica_id, 0.0)
        return [
            DeviceView(
                device,
                tags,
                Use.ROLLOUT if generates else Use.TRAIN,
                running=load.running,
                urgent=load.urgent,
                rate=self._rates.get(load.replica_id, 0.0) if generates else 0.0,
                longest_s=load.longest / speed if speed else 0.0,
                slots=load.slots,
                engine=load.replica_id,
            )
            for device in devices
        ]


@dataclass(eq=False)
class LendingStatistics:
    """Moving averages, in seconds: of a hand-over each way, of a mini-batch's computations, and of the gap after each
    kind of them."""

    switch_s: float = 0.0
    lend_s: float | None = None  # None: as long as a switch
    train_s: float | None = None
    gaps: dict[str, float] = field(default_factory=dict)
    computed_s: float = 0.0  # of the current mini-batch
    last_computation: tuple[str, float] | None = None

    def add_switch(self, seconds: float) -> None:
        self.switch_s = moving_average(self.switch_s or None, seconds)

    def computation_began(self) -> None:
        if self.last_computation is not None:
            name, ended_at = self.last_computation
            self.gaps[name] = moving_average(self.gaps.get(name), time.monotonic() - ended_at)

    def computation_ended(self, name: str, seconds: float) -> None:
        self.computed_s += seconds
        self.last_computation = (name, time.monotonic())

    def mini_batch_ended(self) -> None:
        """All computations of a mini-batch have ended; without any this changes nothing."""
        if self.computed_s:
            self.train_s = moving_average(self.train_s, self.computed_s)
            self.computed_s = 0.0

    @property
    def costs(self) -> Costs:
        lend_s = self.switch_s if self.lend_s is None else self.lend_s
        return Costs(lend_s, self.switch_s, self.train_s or 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"switch_s": self.switch_s, "lend_s": self.lend_s, "train_s": self.train_s, "gaps": dict(self.gaps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.switch_s, self.lend_s, self.train_s = state["switch_s"], state["lend_s"], state["train_s"]
        self.gaps = dict(state["gaps"])


@dataclass(eq=False)
class DeviceLending(ABC):
    """Lends the trainer's devices to the replicas on them, and reclaims them for computations."""

    client: DataPlaneClient
    replicas: Sequence[PlacedReplica]  # on the trainer's devices
    policy: LendingPolicy  # decides which devices generate between two computations
    views: DeviceViews
    progress: Callable[[], TrainingProgress]
    wait_for_group: Callable[[], bool]  # waits for a group to end; whether one did before its time was over
    switching: Callable[[], AbstractContextManager[None]]  # records a hand-over in the ledger
    wait_for_loads: Callable[[], None] = lambda: None
    """returns when no replica loads weights on these devices; raises if a load has failed"""
    depth = 0  # of `training`
    clock_offset_s = 0.0  # a resumed run's clock goes on where the checkpoint's was

    def __post_init__(self) -> None:
        self.ids = [replica.replica_id for replica in self.replicas]
        self.statistics = LendingStatistics()
        self.reclaimed: set[str] = set()  # replicas whose devices training has

    @contextmanager
    def training(self, name: str) -> Iterator[None]:
        """Training has the devices inside the block."""
        if self.depth == 0:
            self._reclaim_all()
        self.depth, began = self.depth + 1, time.monotonic()
        try:
            yield
        finally:
            self.depth -= 1
        if self.depth == 0:  # not after an error, which would wait for a load
            self.statistics.computation_ended(name, time.monotonic() - began)
            self.offer_after(name)

    def offer_after(self, name: str) -> None:
        """This computation has ended."""
        self.offer(self.statistics.gaps.get(name))

    def offer(self, due_in_s: float | None) -> None:
        """Lends what the policy decides to lend; training needs it in `due_in_s` seconds, None: it waits for groups."""
        if not self.reclaimed:
            return
        decision = self.policy.decide(self.view(due_in_s))
        lent = [name for name in self._used_for(decision, Use.ROLLOUT) if name in self.reclaimed]
        if lent:
            self.reclaimed.difference_update(lent)
            self.lend(lent)

    def measure(self, seen: RolloutObservation) -> None:
        """Measures what replicas generate, while training waits: with all devices lent the policy is not asked."""
        self.views.measure(seen, self.reclaimed, time.monotonic() + self.clock_offset_s)

    def before_commit(self) -> None:
        """The next computation is a batch away, and new weights are about to be loaded."""
        self.offer(None)

    def on_committed(self) -> None:  # noqa: B027 - optional in a subclass
        """A new version is committed, and the replicas load it."""

    def on_started(self, ids: Sequence[str]) -> None:  # noqa: B027 - optional in a subclass
        """These replicas, whose devices training does not use now, were started again and have loaded."""

    def reclaims(self) -> bool:
        """Whether training has to reclaim devices before it computes."""
        return self.depth == 0 and len(self.reclaimed) < len(self.ids)

    def wrap_computations(
        self, groups: Mapping[str, Any], prepared: Mapping[str, Callable[..., Any]] = NOTHING
    ) -> None:
        """Puts each computation of the actor's and the reference's worker groups, by verl's names, inside `training`.

        `prepared` has, by the computation's name, what makes of the group, the computation and this a function that
        gets the computation's arguments before the devices are reclaimed, and returns what is then to be computed.
        """
        for group_name, methods in COMPUTATIONS.items():
            group = groups.get(group_name)
            for name in methods if group is not None else ():
                computation = getattr(group, name, None)
                if computation is None or hasattr(computation, "__wrapped__"):
                    continue
                prepare = prepared[name](group, computation, self) if name in prepared else None
                setattr(group, name, self._inside_training(name, computation, prepare))

    def _inside_training(self, name: str, computation: Callable[..., T], prepare: Any) -> Callable[..., T]:
        @functools.wraps(computation)
        def wrapped(*args: Any, **kwargs: Any) -> T:
            prepared = prepare(*args, **kwargs) if prepare else functools.partial(computation, *args, **kwargs)
            with self.training(name):
                return prepared()  # type: ignore[no-any-return]

        return wrapped

    def view(self, due_in_s: float | None) -> LendingView:
        """What the policy sees. The trainer's devices are all handed over together, since an update needs all."""
        progress, now = self.progress(), time.monotonic() + self.clock_offset_s
        devices, demand = self.views.look(self.reclaimed, progress, now)
        return LendingView(now, devices, demand, self.statistics.costs, due_in_s, progress.trained, progress.update)

    def state_dict(self) -> dict[str, Any]:
        """The policy's state, what was measured, and the time on the clock of the views, as plain data."""
        now = time.monotonic() + self.clock_offset_s
        return {"policy": self.policy.state_dict(), "statistics": self.statistics.state_dict(), "now": now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues with a checkpoint's state. Raises ValueError for the state of another policy; nothing changed."""
        self.policy.load_state_dict(state["policy"])
        self.statistics.load_state_dict(state["statistics"])
        self.clock_offset_s = state["now"] - time.monotonic()

    def metrics(self) -> dict[str, float]:
        times = {"lending/switch_s": self.statistics.switch_s, "lending/train_s": self.statistics.train_s or 0.0}
        return times | self.policy.metrics()

    def _reclaim_all(self) -> None:
        self.statistics.computation_began()
        self.wait_for_loads()
        lent = [name for name in self.ids if name not in self.reclaimed]
        if not lent:
            return
        decision = self._decide_to_reclaim(lent)
        cut = [name for name in lent if any(decision[device].carry for device in self._devices(name))]
        with self.switching():
            began = time.monotonic()
            self.reclaim(lent, cut)
            self.statistics.add_switch(time.monotonic() - began)
        self.reclaimed.update(lent)

    def _decide_to_reclaim(self, lent: list[str]) -> Decision:
        """The decision to take these devices; first waits for further groups, as long as the policy would."""
        decision = self.policy.decide(self.view(0.0))
        while set(self._used_for(decision, Use.ROLLOUT)) & set(lent) and self.wait_for_group():
            decision = self.policy.decide(self.view(0.0))
        return decision

    def _used_for(self, decision: Decision, use: Use) -> list[str]:
        """The replicas all of whose devices have this use."""
        return [name for name in self.ids if all(decision[device].use is use for device in self._devices(name))]

    def _devices(self, replica_id: str) -> tuple[str, ...]:
        return self.replicas[self.ids.index(replica_id)].devices

    @abstractmethod
    def reclaim(self, ids: list[str], cut: list[str]) -> None:
        """Takes the devices of these replicas for training; the calls of those in `cut` continue on others."""

    @abstractmethod
    def lend(self, ids: list[str]) -> None:
        """Lets these replicas generate again."""


@dataclass(eq=False)
class ResidentLending(DeviceLending):
    """Both sides stay in memory: replicas pause for a computation and resume after it."""

    resuming: list[Any] = field(default_factory=list, kw_only=True)  # replies of `resume` that were not awaited

    def reclaim(self, ids: list[str], cut: list[str]) -> None:
        ray.get(self.resuming)  # a restarted data plane may receive both commands in any order
        self.resuming.clear()
        self.client.execute("pause", ids, cut)

    def lend(self, ids: list[str]) -> None:
        self.resuming.append(self.client.actor.execute.remote("resume", ids))


@dataclass(eq=False)
class ReleasedLending(DeviceLending):
    """Replicas release memory for training: their cache, and with it their weights or not."""

    _: KW_ONLY
    put_away: Callable[[], Any]  # the memory of all that are released
    load: Callable[[list[str]], list[str]]
    """takes the memory of some of them back, with the committed weights; returns those that then serve"""
    lent = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.orders = itertools.count(1)  # an order repeated after a restart of the data plane gets the same answer

    def reclaim(self, ids: list[str], cut: list[str]) -> None:
        """Cuts all calls: a replica without its cache keeps none."""
        if self.client.execute("release_memory", ids, next(self.orders)):
            self.put_away()

    def offer_after(self, name: str) -> None:
        """Lends nothing after a step's last update: the commit that follows loads the next weights.

        A checkpoint may be written before it, in memory that engines would take.
        """
        demand = self.progress().demand
        if name != UPDATE or demand.left_in_step > demand.needed:
            super().offer_after(name)

    def before_commit(self) -> None:
        """Lends nothing: the commit brings them back, with new weights."""

    def lend(self, ids: list[str]) -> None:
        """Returns when they generate: the device is computing for the load, and a computation would wait for it."""
        with self.switching():
            began = time.monotonic()
            serving = self.load(ids)
            self.statistics.lend_s = moving_average(self.statistics.lend_s, time.monotonic() - began)
        self.lent += len(serving)
        if len(serving) < len(ids):
            ray.get(self.client.actor.checked_metrics.remote())  # ends the run if nothing serves now

    def on_committed(self) -> None:
        self.reclaimed.clear()

    def on_started(self, ids: Sequence[str]) -> None:
        """They have memory, which training takes before it computes."""
        self.reclaimed.difference_update(ids)

    def metrics(self) -> dict[str, float]:
        """Also how many times a replica came back without a commit, in the whole run, and what it takes."""
        own = {"lending/returned": float(self.lent), "lending/return_s": self.statistics.lend_s or 0.0}
        return super().metrics() | own
