"""An update's batch is fetched before its devices are reclaimed, and early enough to be there when they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from verl.single_controller.base.decorator import MAGIC_ATTR

from seamless_verl.trainer import prefetch
from seamless_verl.trainer.prefetch import ACTORS, FETCH, FETCHED, BatchPrefetch, FetchesAhead
from seamless_verl.trainer.workers import SeamlessActorWorker

pytestmark = pytest.mark.integration


class Replies:
    """Ray's `wait` and `get` of replies that come at a time, and the clock, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(refs)
        self.now = min(self.now + timeout, max(self.now, *(ref.comes_at for ref in refs)))
        return [ref for ref in refs if ref.comes_at <= self.now], [ref for ref in refs if ref.comes_at > self.now]

    def get(self, refs: list[Any]) -> None:
        self.now = max(self.now, *(ref.comes_at for ref in refs))
        for ref in refs:
            if ref.error is not None:
                raise ref.error


class Workers:
    """A worker group of two ranks whose fetches take so long."""

    def __init__(self, replies: Replies, error: Exception | None = None) -> None:
        self.replies, self.error, self.seconds = replies, error, 1.0
        self.calls = list[str]()

    def fetch_ahead(self, batch: Any) -> list[Any]:
        self.calls.append(f"fetch {batch}")
        at = self.replies.now
        return [SimpleNamespace(comes_at=at + self.seconds * part, error=self.error) for part in (0.5, 1.0)]

    def update_fetched(self) -> str:
        self.calls.append("update")
        return "trained"


@pytest.fixture
def replies(monkeypatch: pytest.MonkeyPatch) -> Replies:
    found = Replies()
    monkeypatch.setattr(prefetch, "ray", found)
    monkeypatch.setattr(prefetch, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def ahead_of(workers: Workers, *, reclaims: bool = True, switch_s: float = 0.0) -> BatchPrefetch:
    lending: Any = SimpleNamespace(reclaims=lambda: reclaims, statistics=SimpleNamespace(switch_s=switch_s))

    def update(batch: Any) -> str:
        workers.calls.append(f"fetch and update {batch}")
        return "trained"

    return BatchPrefetch(workers, update, lending)


def test_the_second_fetch_begins_so_early_that_it_ends_with_the_reclaim(replies: Replies) -> None:
    workers = Workers(replies)
    ahead = ahead_of(workers, switch_s=0.25)
    for begins, ends in ((0.0, 1.0), (0.75, 1.0)):
        compute = ahead("a")
        assert (replies.now, workers.calls) == (begins, ["fetch a"]), "the reclaim begins"
        replies.now += 0.25
        assert compute() == "trained" and workers.calls == ["fetch a", "update"]
        assert (replies.now, ahead.fetch_s) == (ends, 1.0)
        workers.calls.clear()
        replies.now = 0.0


def test_devices_are_reclaimed_at_once_where_that_takes_longer(replies: Replies) -> None:
    workers = Workers(replies)
    ahead = ahead_of(workers, switch_s=2.0)
    ahead.fetch_s = 1.5
    compute = ahead("a")
    assert replies.now == 0
    replies.now = 1.2  # the reclaim took no longer, in which the fetch has ended at some time
    compute()
    assert ahead.fetch_s == 1.2


def test_a_fetch_that_is_over_is_not_waited_for_as_long_as_the_last(replies: Replies) -> None:
    workers = Workers(replies)
    ahead = ahead_of(workers, switch_s=0.25)
    ahead.fetch_s, workers.seconds = 10.0, 1.0
    ahead("a")()
    assert replies.now == 1 and ahead.fetch_s < 10


def test_verl_s_workers_train_the_actor_in_the_mesh_whose_rows_are_fetched() -> None:
    mode = getattr(SeamlessActorWorker.update_actor, MAGIC_ATTR)["dispatch_mode"]
    assert mode["dispatch_fn"].args == FETCH["dispatch_fn"].args == FETCHED["collect_fn"].args == (ACTORS,)  # type: ignore[attr-defined]
    assert mode["dispatch_fn"].func is FETCH["dispatch_fn"].func  # type: ignore[attr-defined]
    assert mode["collect_fn"].func is FETCHED["collect_fn"].func  # type: ignore[attr-defined]


def test_where_training_has_its_devices_the_update_fetches(replies: Replies) -> None:
    workers = Workers(replies)
    assert ahead_of(workers, reclaims=False)("a")() == "trained"
    assert workers.calls == ["fetch and update a"]


def test_a_fetch_that_fails_ends_the_update(replies: Replies) -> None:
    workers = Workers(replies, ConnectionError("the queue is gone"))
    compute = ahead_of(workers)("a")
    with pytest.raises(ConnectionError, match="the queue is gone"):
        compute()
    assert workers.calls == ["fetch a"], "nothing was trained"


def test_a_worker_trains_each_batch_that_it_fetched_once() -> None:
    worker = FetchesAhead()
    worker.update_actor = lambda data: f"trained {data}"
    worker.fetch_ahead("rows")
    assert worker.update_fetched() == "trained rows"
    with pytest.raises(AssertionError):
        worker.update_fetched()
