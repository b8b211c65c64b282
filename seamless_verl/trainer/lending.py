"""Lends the trainer's devices to generation between its computations, and reclaims them for each.

Owned state: whose devices training has, and how long hand-overs and computations took. A device is handed over only
between two computations, in the trainer's control thread. The rollout manager has paused the replicas before the
trainer computes. The lending policy decides from these times whether a gap between two computations is worth two
hand-overs.
"""

from __future__ import annotations

import functools
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from omegaconf import DictConfig

from seamless_verl.config.schema import Handover
from seamless_verl.resources.lending import Costs, Demand, DeviceView, LendingPolicy, LendingView, Tag, Use
from seamless_verl.resources.lending.marginal import moving_average

if TYPE_CHECKING:
    from seamless_verl.data_plane.client import DataPlaneClient, PlacedReplica


class LendingStatistics:
    """Moving averages, in seconds, of a hand-over, of a computation, and of the gap after each kind of computation."""

    def __init__(self) -> None:
        self.switch_s = 0.0
        self.train_s: float | None = None
        self.gaps: dict[str, float] = {}
        self.last_computation: tuple[str, float] | None = None

    def add_switch(self, seconds: float) -> None:
        self.switch_s = moving_average(self.switch_s or None, seconds)

    def computation_began(self) -> None:
        if self.last_computation is not None:
            name, ended_at = self.last_computation
            self.gaps[name] = moving_average(self.gaps.get(name), time.monotonic() - ended_at)

    def computation_ended(self, name: str, seconds: float) -> None:
        self.train_s = moving_average(self.train_s, seconds)
        self.last_computation = (name, time.monotonic())

    @property
    def costs(self) -> Costs:
        return Costs(self.switch_s, self.switch_s, self.train_s or 0.0)


T = TypeVar("T")
# Worker groups and their methods that compute on the trainer's devices and return when they have. The critic's do not
# wait: see `SeamlessTrainer._compute_values`.
COMPUTATIONS = {
    "actor_rollout_wg": ("compute_log_prob", "update_actor"),
    "ref_policy_wg": ("compute_ref_log_prob",),
}
BOTH = frozenset({Tag.TRAIN, Tag.ROLLOUT})


@dataclass(frozen=True)
class TrainingProgress:
    """How far training is: what it waits for, and how many mini-batches it has taken, in all and in this step."""

    demand: Demand
    trained: int
    update: int


class DeviceLending(ABC):
    """Lends the trainer's devices to the replicas on them, and reclaims them for computations.

    Args:
        client: the data plane client.
        replicas: the replicas on the trainer's devices.
        policy: decides which devices generate between two computations.
        progress: returns how far training is.
        switching: records a hand-over in the ledger.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        replicas: Sequence[PlacedReplica],
        policy: LendingPolicy,
        progress: Callable[[], TrainingProgress],
        switching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.client, self.replicas, self.policy = client, replicas, policy
        self.progress, self.switching = progress, switching
        self.ids = [replica.replica_id for replica in replicas]
        self.statistics = LendingStatistics()
        self.reclaimed: set[str] = set()  # replicas whose devices training has
        self.depth = 0
        self.calls_at_reclaim: dict[str, int] = {}

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
            if self.depth == 0:
                self.statistics.computation_ended(name, time.monotonic() - began)
                self.offer(self.statistics.gaps.get(name))

    def offer(self, due_in_s: float | None) -> None:
        """Lends the devices that the policy decides to lend.

        Training needs them again in `due_in_s` seconds; None: it waits for what they are to generate.
        """
        if not self.reclaimed:
            return
        decision = self.policy.decide(self.view(due_in_s))
        lent = [
            replica.replica_id
            for replica in self.replicas
            if replica.replica_id in self.reclaimed
            and all(decision[device].use is Use.ROLLOUT for device in replica.devices)
        ]
        if lent:
            self.reclaimed.difference_update(lent)
            self.lend(lent)

    def on_committed(self) -> None:  # noqa: B027 - optional in a subclass
        """Called when new weights are in all replicas."""

    def wrap(self, name: str, computation: Callable[..., T]) -> Callable[..., T]:
        """The computation inside `training`."""

        @functools.wraps(computation)
        def wrapped(*args: Any, **kwargs: Any) -> T:
            with self.training(name):
                return computation(*args, **kwargs)

        return wrapped

    def wrap_computations(self, trainer: Any) -> None:
        """Puts each computation of the actor's and the reference's worker groups inside `training`.

        The critic's group returns before it has computed, so the trainer puts what waits for it inside.
        """
        for group_name, methods in COMPUTATIONS.items():
            group = getattr(trainer, group_name, None)
            for name in methods if group is not None else ():
                if hasattr(group, name) and not hasattr(getattr(group, name), "__wrapped__"):
                    setattr(group, name, self.wrap(name, getattr(group, name)))

    def view(self, due_in_s: float | None) -> LendingView:
        """What the policy sees: the trainer's devices, which are all handed over together, since an update needs all.

        Replicas on other devices are left out. The calls frozen on these replicas continue nowhere else, so a policy
        must not keep them frozen because other replicas generate while training waits.
        """
        devices = [
            DeviceView(
                device,
                BOTH,
                Use.TRAIN if replica.replica_id in self.reclaimed else Use.ROLLOUT,
                running=self.calls_at_reclaim.get(replica.replica_id, 0),
            )
            for replica in self.replicas
            for device in replica.devices
        ]
        progress = self.progress()
        demand = progress.demand
        if due_in_s is None:  # training lacks groups, so every slot has a call or soon will
            demand = replace(demand, waiting=sum(device.seats for device in devices))
        done = (progress.trained, progress.update)
        return LendingView(time.monotonic(), tuple(devices), demand, self.statistics.costs, due_in_s, *done)

    def metrics(self) -> dict[str, float]:
        times = {"lending/switch_s": self.statistics.switch_s, "lending/train_s": self.statistics.train_s or 0.0}
        return times | self.policy.metrics()

    def _reclaim_all(self) -> None:
        self.statistics.computation_began()
        lent = [name for name in self.ids if name not in self.reclaimed]
        if not lent:
            return
        with self.switching():
            began = time.monotonic()
            self.calls_at_reclaim |= self.reclaim(lent)
            self.statistics.add_switch(time.monotonic() - began)
        self.reclaimed.update(lent)

    @abstractmethod
    def reclaim(self, ids: list[str]) -> dict[str, int]:
        """Takes the devices of these replicas for training; returns how many calls each had."""

    @abstractmethod
    def lend(self, ids: list[str]) -> None:
        """Lets these replicas generate again."""


class ResidentLending(DeviceLending):
    """Both sides stay in memory: replicas pause for a computation and resume after it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.resuming: list[Any] = []  # replies of `resume` that were not awaited

    def reclaim(self, ids: list[str]) -> dict[str, int]:
        ray.get(self.resuming)  # a restarted data plane may receive both commands in any order
        return dict(self.client.execute("pause", ids))

    def lend(self, ids: list[str]) -> None:
        self.resuming = [self.client.actor.execute.remote("resume", ids)]


class ReleasedLending(DeviceLending):
    """Memory holds one side at a time: replicas release weights and cache, and come back with a commit."""

    def __init__(self, *args: Any, sleep_replicas: Callable[[], Any]) -> None:
        super().__init__(*args)
        self.sleep_replicas = sleep_replicas
        self.orders = itertools.count(1)  # an order repeated after a restart of the data plane gets the same answer

    def reclaim(self, ids: list[str]) -> dict[str, int]:
        if calls := self.client.execute("release_memory", ids, next(self.orders)):
            self.sleep_replicas()
        return dict(calls)

    def offer(self, due_in_s: float | None) -> None:
        """Lends nothing: the weights they released are old, and the next commit lends them with new ones."""

    def lend(self, ids: list[str]) -> None:
        """Does nothing: the commit lends them."""

    def on_committed(self) -> None:
        self.reclaimed.clear()


def handover_of(setting: Handover, config: DictConfig) -> Handover:
    """The hand-over that a run uses, RESIDENT or RELEASED; AUTO depends on the device and on `free_cache_engine`."""
    if setting is not Handover.AUTO:
        return setting
    releases = config.trainer.device != "cpu" and config.actor_rollout_ref.rollout.free_cache_engine
    return Handover.RELEASED if releases else Handover.RESIDENT
