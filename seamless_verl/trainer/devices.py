"""Who has the trainer's devices: training while it computes, the replicas on them at all other times.

Owned state: whether training has them. A device changes hands only between two computations, in the
trainer's one thread of control; the rollout manager is told, and has stopped or started the replicas
before the other side computes.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import ray

T = TypeVar("T")
# The trainer's worker groups, and their methods that compute on its devices and return when they have.
COMPUTATIONS = {
    "actor_rollout_wg": ("compute_log_prob", "update_actor"),
    "ref_policy_wg": ("compute_ref_log_prob",),
    "critic_wg": ("infer_batch",),
}


class Devices(ABC):
    """The trainer's devices that replicas generate on too; `ids` are those replicas, `switching` notes a hand-over."""

    def __init__(self, plane: Any, ids: Sequence[str], switching: Callable[[], AbstractContextManager[None]]) -> None:
        self.plane, self.ids, self.switching = plane, list(ids), switching
        self.depth = 0
        self.thawing: list[Any] = []  # what was asked for and not waited for
        self.orders = itertools.count(1)  # an order that is repeated after the plane's restart has the same answer

    @contextmanager
    def training(self) -> Iterator[None]:
        """Training has the devices inside the block."""
        if self.depth == 0 and self.ids:
            with self.switching():
                self.reclaim()
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0 and self.ids:
                self.lend()

    def around(self, computation: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(computation)
        def computed(*args: Any, **kwargs: Any) -> T:
            with self.training():
                return computation(*args, **kwargs)

        return computed

    def guard(self, trainer: Any) -> None:
        """Put every computation of the trainer's worker groups inside `training`."""
        for name, methods in COMPUTATIONS.items():
            group = getattr(trainer, name, None)
            for method in methods if group is not None else ():
                if hasattr(group, method) and not hasattr(getattr(group, method), "__wrapped__"):
                    setattr(group, method, self.around(getattr(group, method)))

    @abstractmethod
    def reclaim(self) -> None:
        """Training takes them."""

    @abstractmethod
    def lend(self) -> None:
        """They generate again."""


class Shared(Devices):
    """Weights and cache of both sides fit beside each other: replicas freeze for a computation and go on after it."""

    def reclaim(self) -> None:
        ray.get(self.thawing)  # a plane that was started again may hear of both in any order
        ray.get(self.plane.freeze.remote(self.ids))

    def lend(self) -> None:
        self.thawing = [self.plane.thaw.remote(self.ids)]


class Released(Devices):
    """Their memory holds one side at a time: replicas put their weights and cache away, and come back with a commit."""

    def __init__(self, *args: Any, sleep: Callable[[], Any]) -> None:
        super().__init__(*args)
        self.sleep = sleep

    def reclaim(self) -> None:
        if ray.get(self.plane.part.remote(self.ids, next(self.orders))):
            self.sleep()

    def lend(self) -> None:
        """Not before the next commit: what they put away are old weights."""
