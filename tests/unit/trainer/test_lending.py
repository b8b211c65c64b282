"""The lending policy's view of the trainer's devices, and what its decisions do."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from seamless_verl.resources.lending import Assignment, Decision, Demand, LendingReason, LendingView, Use
from seamless_verl.trainer.lending import DeviceLending, TrainingProgress


class FixedPolicy:
    """A policy that gives the devices of its list away, and keeps what it saw."""

    def __init__(self, *lent: str) -> None:
        self.lent, self.seen = set(lent), list[LendingView]()

    def decide(self, view: LendingView) -> Decision:
        self.seen.append(view)
        uses = {one.device_id: Use.ROLLOUT if one.device_id in self.lent else Use.TRAIN for one in view.devices}
        return {name: Assignment(use, LendingReason.GAIN) for name, use in uses.items()}

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


class RecordedLending(DeviceLending):
    """Devices whose hand-overs are only recorded."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.orders_given: list[tuple[str, list[str]]] = []

    def reclaim(self, ids: list[str]) -> dict[str, int]:
        self.orders_given.append(("reclaim", sorted(ids)))
        return dict.fromkeys(ids, 7)

    def lend(self, ids: list[str]) -> None:
        self.orders_given.append(("lend", sorted(ids)))


START = TrainingProgress(Demand(ready=0, needed=4, left_in_step=16), trained=0, update=0)


def devices(policy: FixedPolicy, progress: TrainingProgress = START) -> RecordedLending:
    replicas: Any = [SimpleNamespace(replica_id=f"replica-{i}", devices=(f"train-{i}",)) for i in range(2)]
    return RecordedLending(None, replicas, policy, lambda: progress, nullcontext)


def test_a_computation_takes_all_devices_and_gives_back_what_the_policy_lends() -> None:
    policy = FixedPolicy("train-1")
    lending = devices(policy)
    with lending.training("update_actor"), lending.training("inner"):
        assert lending.reclaimed == {"replica-0", "replica-1"}
    assert lending.orders_given == [("reclaim", ["replica-0", "replica-1"]), ("lend", ["replica-1"])]
    with lending.training("update_actor"):
        pass
    assert lending.orders_given[2:] == [("reclaim", ["replica-1"]), ("lend", ["replica-1"])]


def test_the_policy_sees_where_training_is_and_what_the_engines_had() -> None:
    policy = FixedPolicy()
    lending = devices(policy, TrainingProgress(Demand(ready=3, needed=4, left_in_step=8), trained=6, update=2))
    with lending.training("update_actor"):
        pass
    lending.offer(None)
    between, waiting = policy.seen
    assert between.due_in_s is None, "nothing is known yet of what comes after this computation"
    assert (waiting.trained, waiting.update, waiting.demand.left_in_step, waiting.demand.ready) == (6, 2, 8, 3)
    assert waiting.demand.waiting > 0 and [one.running for one in waiting.devices] == [7, 7]


def test_the_pause_after_a_computation_is_known_the_second_time() -> None:
    policy = FixedPolicy()
    lending = devices(policy)
    for _ in range(3):
        with lending.training("compute_log_prob"):
            pass
    due = [view.due_in_s for view in policy.seen]
    assert due[0] is None and due[1] is not None and due[1] >= 0


def test_nothing_is_offered_that_training_does_not_have() -> None:
    policy = FixedPolicy("train-0", "train-1")
    lending = devices(policy)
    lending.offer(None)
    assert not policy.seen and not lending.orders_given
