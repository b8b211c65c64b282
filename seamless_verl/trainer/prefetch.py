"""The batch of an update is fetched while engines are being frozen for it, where verl fetches it when they are.

A worker reads its rows out of TransferQueue before it trains them, for which it needs no device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
from verl.single_controller.base.decorator import (
    collect_lazy_compute_data_proto,
    dispatch_lazy_compute_data_proto,
    dispatch_one_to_all,
    register,
)

from seamless_verl.resources.lending.marginal import moving_average
from seamless_verl.trainer.lending import DeviceLending

ACTORS = "actor"  # verl's name for the mesh of ranks that train the actor
Computation = Callable[[], Any]


def replies(group: Any, output: Sequence[Any]) -> Sequence[Any]:
    """What each rank returned, or is to return."""
    return output


FETCH = {"dispatch_fn": partial(dispatch_lazy_compute_data_proto, ACTORS), "collect_fn": replies}
FETCHED = {"dispatch_fn": dispatch_one_to_all, "collect_fn": partial(collect_lazy_compute_data_proto, ACTORS)}


class FetchesAhead:
    """Methods of a worker that trains the actor."""

    fetched: Any = None
    update_actor: Callable[[Any], Any]

    @register(dispatch_mode=FETCH, blocking=False)
    def fetch_ahead(self, data: Any) -> None:
        """Keeps the rank's rows for its next update: verl's bridge has read them before it calls this."""
        self.fetched = data

    @register(dispatch_mode=FETCHED)
    def update_fetched(self) -> Any:
        """verl's `update_actor` of the rows that were fetched."""
        data, self.fetched = self.fetched, None
        assert data is not None, "no batch was fetched for this update"
        return self.update_actor(data)


class BatchPrefetch:
    """Begins the fetch of an update's batch; where training has its devices already, `update` of `group` is called."""

    def __init__(self, group: Any, update: Callable[[Any], Any], lending: DeviceLending) -> None:
        self.group, self.update, self.lending = group, update, lending
        self.fetch_s: float | None = None

    def __call__(self, batch: Any) -> Computation:
        """What is to be computed, once training has the devices; returns when it is time to reclaim them."""
        if not self.lending.reclaims():
            return partial(self.update, batch)
        began = time.monotonic()
        fetches = self.group.fetch_ahead(batch)
        lead_s = max(0.0, (self.fetch_s or 0.0) - self.lending.statistics.switch_s)
        _, open_fetches = ray.wait(fetches, num_returns=len(fetches), timeout=lead_s)
        if not open_fetches:
            self._took(time.monotonic() - began)
        return partial(self._update_fetched, fetches, began)

    def _update_fetched(self, fetches: Sequence[Any], began: float) -> Any:
        _, open_fetches = ray.wait(list(fetches), num_returns=len(fetches), timeout=0)
        ray.get(list(fetches))  # also raises what ended one
        if open_fetches:
            self._took(time.monotonic() - began)
        elif self.fetch_s is not None:  # it took less than the reclaim and the lead
            self.fetch_s = min(self.fetch_s, time.monotonic() - began)
        return self.group.update_fetched()

    def _took(self, seconds: float) -> None:
        self.fetch_s = max(seconds, moving_average(self.fetch_s, seconds))  # what is late holds every device up
