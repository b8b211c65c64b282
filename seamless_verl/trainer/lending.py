"""What hand-overs and computations took, as the lending policy wants to know it.

Who has the trainer's devices: training while it computes, the replicas on them at all other times.

Owned state: who has them, and what hand-overs and computations took. A device changes hands only between
two computations, in the trainer's one thread of control; the rollout manager is told, and has stopped the
replicas before the trainer computes. Whether a pause between two computations is worth two hand-overs is
the lending policy's to say, from what has been measured so far.
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
from seamless_verl.resources.lending.marginal import averaged

if TYPE_CHECKING:
    from seamless_verl.data_plane.client import PlacedReplica


class LendingStatistics:
    """Moving averages: seconds of a hand-over, of a mini-batch's training, and from each computation to the next."""

    def __init__(self) -> None:
        self.switch_s = 0.0
        self.train_s: float | None = None
        self.gaps: dict[str, float] = {}
        self.ended: tuple[str, float] | None = None

    def switched(self, seconds: float) -> None:
        self.switch_s = averaged(self.switch_s or None, seconds)

    def begins(self) -> None:
        if self.ended is not None:
            name, at = self.ended
            self.gaps[name] = averaged(self.gaps.get(name), time.monotonic() - at)

    def has_ended(self, name: str, seconds: float) -> None:
        self.train_s = averaged(self.train_s, seconds)
        self.ended = (name, time.monotonic())

    @property
    def costs(self) -> Costs:
        return Costs(self.switch_s, self.switch_s, self.train_s or 0.0)


T = TypeVar("T")
# The trainer's worker groups, and their methods that compute on its devices and return when they have.
COMPUTATIONS = {
    "actor_rollout_wg": ("compute_log_prob", "update_actor"),
    "ref_policy_wg": ("compute_ref_log_prob",),
}
BOTH = frozenset({Tag.TRAIN, Tag.ROLLOUT})


@dataclass(frozen=True)
class TrainingProgress:
    """Where training is: what it waits for, and the mini-batches that it has taken, in all and in this step."""

    demand: Demand
    trained: int
    update: int


class DeviceLending(ABC):
    """The trainer's devices that `replicas` generate on too. `switching` notes a hand-over; `progress` says where
    training is."""

    def __init__(
        self,
        plane: Any,
        replicas: Sequence[PlacedReplica],
        policy: LendingPolicy,
        progress: Callable[[], TrainingProgress],
        switching: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.plane, self.replicas, self.policy = plane, replicas, policy
        self.progress, self.switching = progress, switching
        self.ids = [one.replica_id for one in replicas]
        self.measured = LendingStatistics()
        self.taken: set[str] = set()  # replicas whose devices training has
        self.depth = 0
        self.running: dict[str, int] = {}
        self.thawing: list[Any] = []  # what was asked for and not waited for
        self.orders = itertools.count(1)  # an order that is repeated after the plane's restart has the same answer

    @contextmanager
    def training(self, name: str) -> Iterator[None]:
        """Training has the devices inside the block."""
        if self.depth == 0:
            self._take()
        self.depth, began = self.depth + 1, time.monotonic()
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                self.measured.has_ended(name, time.monotonic() - began)
                self.offer(self.measured.gaps.get(name))

    def offer(self, due_in_s: float | None) -> None:
        """Training needs them again in so many seconds, or, with None, waits for what they are to generate: the
        policy decides which of them do."""
        if not self.taken:
            return
        decision = self.policy.decide(self.view(due_in_s))
        lent = [
            one.replica_id
            for one in self.replicas
            if one.replica_id in self.taken and all(decision[device].use is Use.ROLLOUT for device in one.devices)
        ]
        if lent:
            self.taken.difference_update(lent)
            self.lend(lent)

    def committed(self) -> None:  # noqa: B027 - not every kind has something to do then
        """New weights are in all replicas."""

    def around(self, name: str, computation: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(computation)
        def computed(*args: Any, **kwargs: Any) -> T:
            with self.training(name):
                return computation(*args, **kwargs)

        return computed

    def guard(self, trainer: Any) -> None:
        """Put every computation of the trainer's worker groups inside `training`."""
        for group_name, methods in COMPUTATIONS.items():
            group = getattr(trainer, group_name, None)
            for name in methods if group is not None else ():
                if hasattr(group, name) and not hasattr(getattr(group, name), "__wrapped__"):
                    setattr(group, name, self.around(name, getattr(group, name)))

    def view(self, due_in_s: float | None) -> LendingView:
        """What the policy sees; the devices hand over together, since an update needs them all.

        Replicas elsewhere are not in it: calls that are frozen here go on nowhere else, so that a policy must
        never take others' generating for a reason to keep these frozen while training waits.
        """
        devices = [
            DeviceView(
                device,
                BOTH,
                Use.TRAIN if one.replica_id in self.taken else Use.ROLLOUT,
                running=self.running.get(one.replica_id, 0),
            )
            for one in self.replicas
            for device in one.devices
        ]
        progress = self.progress()
        demand = progress.demand
        if due_in_s is None:  # groups are missing, so there is a call for every seat, or is about to be
            demand = replace(demand, waiting=sum(device.seats for device in devices))
        where = (progress.trained, progress.update)
        return LendingView(time.monotonic(), tuple(devices), demand, self.measured.costs, due_in_s, *where)

    def metrics(self) -> dict[str, float]:
        measured = {"lending/switch_s": self.measured.switch_s, "lending/train_s": self.measured.train_s or 0.0}
        return measured | self.policy.metrics()

    def _take(self) -> None:
        self.measured.begins()
        serving = [name for name in self.ids if name not in self.taken]
        if not serving:
            return
        with self.switching():
            began = time.monotonic()
            self.running |= self.reclaim(serving)
            self.measured.switched(time.monotonic() - began)
        self.taken.update(serving)

    @abstractmethod
    def reclaim(self, ids: list[str]) -> dict[str, int]:
        """Training takes their devices; returns the calls that each replica had."""

    @abstractmethod
    def lend(self, ids: list[str]) -> None:
        """They generate again."""


class ResidentLending(DeviceLending):
    """Weights and cache of both sides fit beside each other: replicas freeze for a computation and go on after it."""

    def reclaim(self, ids: list[str]) -> dict[str, int]:
        ray.get(self.thawing)  # a plane that was started again may hear of both in any order
        return dict(ray.get(self.plane.freeze.remote(ids)))

    def lend(self, ids: list[str]) -> None:
        self.thawing = [self.plane.thaw.remote(ids)]


class ReleasedLending(DeviceLending):
    """Their memory holds one side at a time: replicas put their weights and cache away, and come back with a commit."""

    def __init__(self, *args: Any, sleep: Callable[[], Any]) -> None:
        super().__init__(*args)
        self.sleep = sleep

    def reclaim(self, ids: list[str]) -> dict[str, int]:
        if calls := ray.get(self.plane.part.remote(ids, next(self.orders))):
            self.sleep()
        return dict(calls)

    def offer(self, due_in_s: float | None) -> None:
        """Not before the next commit, which lends them: what they put away are old weights."""

    def lend(self, ids: list[str]) -> None:
        """The commit does it."""

    def committed(self) -> None:
        self.taken.clear()


def handover_of(asked: Handover, config: DictConfig) -> Handover:
    """SHARED or RELEASED."""
    if asked is not Handover.AUTO:
        return asked
    releases = config.trainer.device != "cpu" and config.actor_rollout_ref.rollout.free_cache_engine
    return Handover.RELEASED if releases else Handover.SHARED
