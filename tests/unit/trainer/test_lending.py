"""The lending policy's view of the trainer's devices, and what its decisions do."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from seamless_verl.resources.lending.marginal import GroupInterval, Marginal
from seamless_verl.resources.lending.policy import (
    Assignment,
    Decision,
    Demand,
    LendingReason,
    LendingView,
    Never,
    StepBoundary,
    Use,
)
from seamless_verl.rollout.observation import ReplicaLoad, RolloutObservation
from seamless_verl.tools.simulator.scenario import BOTH as SIMULATED_BOTH
from seamless_verl.tools.simulator.scenario import WORKLOADS, Scenario, Scheduler
from seamless_verl.tools.simulator.simulate import Simulation
from seamless_verl.trainer.lending import (
    DeviceLending,
    DeviceViews,
    ReleasedLending,
    ResidentLending,
    RunDevices,
    TrainingProgress,
)


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


class ToldLending(DeviceLending):
    """Devices whose hand-overs are only kept."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.orders_given: list[tuple[str, list[str]]] = []
        self.cut = list[str]()

    def reclaim(self, ids: list[str], cut: list[str]) -> None:
        self.orders_given.append(("reclaim", sorted(ids)))
        self.cut = sorted(cut)

    def lend(self, ids: list[str]) -> None:
        self.orders_given.append(("lend", sorted(ids)))


START = TrainingProgress(Demand(ready=0, needed=4, left_in_step=16), trained=0, update=0)
SHARED = {f"replica-{i}": (f"train-{i}",) for i in range(2)}
SEEN = RolloutObservation((ReplicaLoad("replica-0", running=7, slots=8), ReplicaLoad("replica-1", running=5, slots=8)))


def parts(
    policy: Any,
    progress: TrainingProgress = START,
    rollout: dict[str, tuple[str, ...]] | None = None,
    groups: Iterable[bool] = (),
    seen: RolloutObservation = SEEN,
) -> Any:
    """What makes a DeviceLending, but for the client: two replicas on the trainer's devices."""
    ending = iter(groups)
    replicas: Any = [SimpleNamespace(replica_id=name, devices=devices) for name, devices in SHARED.items()]
    views = DeviceViews(RunDevices(SHARED, rollout or {}, ("train-0", "train-1")), lambda late: seen)
    return replicas, policy, views, lambda: progress, lambda: next(ending, False), nullcontext


def devices(*args: Any, **more: Any) -> ToldLending:
    return ToldLending(None, *parts(*args, **more))


def test_a_computation_takes_all_devices_and_gives_back_what_the_policy_lends() -> None:
    policy = FixedPolicy("train-1")
    lending = devices(policy)
    with lending.training("update_actor"), lending.training("inner"):
        assert lending.reclaimed == {"replica-0", "replica-1"}
    assert lending.orders_given == [("reclaim", ["replica-0", "replica-1"]), ("lend", ["replica-1"])]
    with lending.training("update_actor"):
        pass
    assert lending.orders_given[2:] == [("reclaim", ["replica-1"]), ("lend", ["replica-1"])]


def test_the_policy_sees_where_training_is_and_what_the_engines_have() -> None:
    policy = FixedPolicy()
    demand = Demand(ready=3, needed=4, left_in_step=8)
    lending = devices(policy, TrainingProgress(demand, trained=6, update=2, late=("a",), unfinished=20))
    with lending.training("update_actor"):
        pass
    lending.offer(None)
    reclaiming, between, waiting = policy.seen
    assert reclaiming.due_in_s == 0 and {one.use for one in reclaiming.devices} == {Use.ROLLOUT}
    assert between.due_in_s is None, "nothing is known yet of what comes after this computation"
    assert (waiting.trained, waiting.update) == (6, 2)
    assert waiting.demand == replace(demand, held=True, coming=20 - 7 - 5)
    assert [(one.running, one.slots, one.use) for one in waiting.devices] == [(7, 8, Use.TRAIN), (5, 8, Use.TRAIN)]


def test_a_policy_that_waits_for_more_groups_is_waited_for_as_long_as_groups_end() -> None:
    policy = FixedPolicy("train-0")
    lending = devices(policy, groups=[True, True, False])
    with lending.training("update_actor"):
        assert lending.reclaimed == {"replica-0", "replica-1"}, "in vain: no further group ended"
        assert [view.due_in_s for view in policy.seen] == [0, 0, 0]


def test_calls_move_to_a_device_that_goes_on_generating() -> None:
    third = RolloutObservation((*SEEN.replicas, ReplicaLoad("replica-2", running=0, slots=8)))
    lending = devices(Marginal(), rollout={"replica-2": ("rollout-0",)}, seen=third)
    with lending.training("update_actor"):
        assert lending.cut == ["replica-0", "replica-1"]
    lost = devices(Marginal(), rollout={"replica-2": ("rollout-0",)})
    with lost.training("update_actor"):
        assert lost.cut == [], "the device's replica is gone: they would have nowhere to go"
    alone = devices(Marginal())
    with alone.training("update_actor"):
        assert alone.cut == []


def without_progress(policy: Any, seen: RolloutObservation, more: dict[str, Any]) -> ToldLending:
    """Devices after a computation, where training waits for the last of four groups."""
    demand = Demand(ready=3, needed=4, left_in_step=16)
    lending = devices(policy, TrainingProgress(demand, trained=1, update=0, **more), seen=seen)
    lending.statistics.lend_s = 5.0
    with lending.training("update_actor"):
        pass
    for _ in range(3):
        lending.offer(None)
        lending.clock_offset_s += 0.25
    return lending


def test_a_dead_replica_is_not_lent_in_the_place_of_a_living_one() -> None:
    seen = RolloutObservation((ReplicaLoad("replica-0", slots=0), ReplicaLoad("replica-1", slots=8)), waiting=1)
    policy = Marginal()
    policy.load_state_dict(Marginal().state_dict() | {"pace": {**vars(GroupInterval()), "seconds": 0.1}})
    lending = without_progress(policy, seen, {})
    assert lending.orders_given[1:] == [("lend", ["replica-1"])]


def test_the_time_between_groups_is_that_of_generation() -> None:
    policy = Marginal()
    progress = [START]
    replicas, _, _, _, *rest = parts(policy)
    seen = [RolloutObservation(SEEN.replicas, finished=0)]
    views = DeviceViews(RunDevices(SHARED, {}, ("train-0", "train-1")), lambda late: seen[0])
    lending = ToldLending(None, replicas, policy, views, lambda: progress[0], *rest)
    for finished in (0, 4, 8):
        seen[0] = RolloutObservation(SEEN.replicas, finished=finished)
        with lending.training("update_actor"):
            lending.clock_offset_s += 100.0  # training's
        lending.offer(None)
        lending.clock_offset_s += 6.0  # four groups are generated meanwhile
    assert policy.state_dict()["pace"]["seconds"] == pytest.approx(6.0 / 4, rel=0.05)


def test_a_replica_of_several_devices_is_lent_whole_for_a_single_call(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {f"replica-{i}": tuple(f"train-{4 * i + j}" for j in range(4)) for i in range(4)}
    monkeypatch.setattr(sys.modules[__name__], "SHARED", wide)
    seen = RolloutObservation(tuple(ReplicaLoad(name, slots=8) for name in wide), waiting=1)
    lending = without_progress(Marginal(), seen, {"unfinished": 2})
    assert lending.orders_given[1] == ("lend", ["replica-0", "replica-3"]), "two calls, a replica for each"


def test_never_lends_where_the_last_replica_of_its_own_is_gone() -> None:
    """Else calls would wait for ever: there is none that will generate."""
    alone = {"replica-2": ("rollout-0",)}
    seen = RolloutObservation((*SEEN.replicas, ReplicaLoad("replica-2", slots=0)), waiting=4)
    lending = devices(Never(), replace(START, trained=1), alone, seen=seen)
    with lending.training("update_actor"):
        pass
    lending.offer(None)
    assert lending.orders_given[1:] == [("lend", ["replica-0", "replica-1"])]


def test_state_is_what_was_measured_on_a_clock_that_goes_on() -> None:
    first = devices(Marginal())
    first.statistics.add_switch(0.5)
    for _ in range(2):
        with first.training("update_actor"):
            pass
        first.statistics.mini_batch_ended()
    state = json.loads(json.dumps(first.state_dict()))
    second = devices(Marginal())
    second.load_state_dict(state)
    assert second.statistics.state_dict() == first.statistics.state_dict()
    assert second.policy.state_dict() == first.policy.state_dict()
    assert 0 <= second.view(None).now - state["now"] < 60
    with pytest.raises(ValueError, match="StepBoundary was given the state of Marginal"):
        devices(StepBoundary()).load_state_dict(state)


def test_the_pause_after_a_computation_is_known_the_second_time() -> None:
    policy = FixedPolicy()
    lending = devices(policy)
    for _ in range(3):
        with lending.training("compute_log_prob"):
            pass
    due = [view.due_in_s for view in policy.seen if view.due_in_s != 0]
    assert due[0] is None and due[1] is not None and due[1] > 0


def test_nothing_is_offered_that_training_does_not_have() -> None:
    policy = FixedPolicy("train-0", "train-1")
    lending = devices(policy)
    lending.offer(None)
    assert not policy.seen and not lending.orders_given


class StubClient:
    """A data plane that has released what it is told to, once for each order, and has a fault of its own or not."""

    def __init__(self) -> None:
        self.calls = list[str]()
        self.actor = SimpleNamespace(checked_metrics=SimpleNamespace(remote=lambda: self.calls.append("checked")))

    def execute(self, command: str, ids: list[str], order: int) -> dict[str, int]:
        self.calls.append(f"{command} {' '.join(sorted(ids))} {order}")
        return dict.fromkeys(ids, 3)


def releasing(client: StubClient, monkeypatch: pytest.MonkeyPatch, serving: list[str]) -> ReleasedLending:
    """Devices whose memory is released; a load leaves `serving` serving."""
    monkeypatch.setattr("seamless_verl.trainer.lending.ray.get", lambda reply: reply)

    def load(ids: list[str]) -> list[str]:
        client.calls.append(f"load {' '.join(ids)}")
        return serving

    policy = FixedPolicy("train-0", "train-1")
    return ReleasedLending(client, *parts(policy), put_away=lambda: client.calls.append("put away"), load=load)


def test_memory_is_put_away_for_a_computation_and_taken_back_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = StubClient()
    lending = releasing(client, monkeypatch, ["replica-0", "replica-1"])
    for order in (1, 2):
        with lending.training("update_actor"):
            assert client.calls == [f"release_memory replica-0 replica-1 {order}", "put away"]
        assert client.calls[2:] == ["load replica-0 replica-1"]
        client.calls.clear()
    assert lending.metrics()["lending/returned"] == 4


def test_a_lend_after_which_a_replica_does_not_serve_is_checked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client = StubClient()
    lending = releasing(client, monkeypatch, ["replica-1"])
    with lending.training("update_actor"):
        client.calls.clear()
    assert client.calls == ["load replica-0 replica-1", "checked"]
    assert lending.metrics()["lending/returned"] == 1


def test_after_a_steps_last_update_nothing_is_loaded_that_the_commit_would_load_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = StubClient()
    lending = releasing(client, monkeypatch, ["replica-0", "replica-1"])
    lending.progress = lambda: replace(START, demand=Demand(ready=4, needed=4, left_in_step=4))
    with lending.training("compute_log_prob"):
        client.calls.clear()
    assert client.calls == ["load replica-0 replica-1"], "the update is yet to come"
    with lending.training("update_actor"):
        client.calls.clear()
    assert client.calls == [] and lending.reclaimed == {"replica-0", "replica-1"}


def test_a_pause_follows_every_resume_that_was_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    awaited, sent = list[list[str]](), list[str]()
    monkeypatch.setattr("seamless_verl.trainer.lending.ray.get", lambda replies: awaited.append(list(replies)))
    execute = SimpleNamespace(remote=lambda command, ids: f"{command} {ids[0]}")
    client = SimpleNamespace(actor=SimpleNamespace(execute=execute), execute=lambda *order: sent.append(order[0]))
    lending = ResidentLending(client, *parts(FixedPolicy()))
    lending.lend(["replica-0"])
    lending.lend(["replica-1"])
    lending.reclaim(["replica-0", "replica-1"], [])
    lending.reclaim(["replica-0", "replica-1"], [])
    assert awaited == [["resume replica-0", "resume replica-1"], []] and sent == ["pause", "pause"]


def test_what_a_commit_brings_back_is_not_lent_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    client = StubClient()
    lending = releasing(client, monkeypatch, [])
    lending.reclaimed = {"replica-0", "replica-1"}
    lending.before_commit()
    assert client.calls == [] and lending.reclaimed
    lending.on_committed()
    assert lending.reclaimed == set()


def varied(views: Iterable[LendingView]) -> set[str]:
    """The fields that have another value than their default in one of these views, by their paths."""
    found = set[str]()
    for shown in views:
        for part in (shown, shown.demand, shown.costs, *shown.devices):
            for item in fields(part):
                if getattr(part, item.name) != item.default:
                    found.add(f"{type(part).__name__}.{item.name}")
    return found


def test_no_field_of_a_view_is_set_by_the_simulator_and_not_by_the_trainer() -> None:
    seen = FixedPolicy()

    class Watched(Marginal):
        def decide(self, view: LendingView) -> Decision:
            seen.seen.append(view)
            return super().decide(view)

    scheduler = Scheduler(max_staleness=1, ahead=1)
    scenario = Scenario(workload=WORKLOADS["w2"], devices=(SIMULATED_BOTH, SIMULATED_BOTH), scheduler=scheduler)
    Simulation(scenario, policy=Watched()).run()
    simulated = varied(seen.seen)
    assert {"DeviceView.urgent", "DeviceView.longest_s", "Demand.held", "Demand.coming"} <= simulated

    loads = tuple(ReplicaLoad(name, 4, 2, 8, 100, 50.0) for name in (*SHARED, "replica-2"))
    progress = TrainingProgress(Demand(1, 4, 8), trained=3, update=1, late=("u",), unfinished=40)
    replicas, policy, _, _, *rest = parts(FixedPolicy())
    devices = RunDevices(SHARED, {"replica-2": ("rollout-0",)}, ("train-0", "train-1"))
    views = DeviceViews(devices, lambda late: RolloutObservation(loads, waiting=5, finished=7))
    live = ToldLending(None, replicas, policy, views, lambda: progress, *rest)
    live.view(0.0)
    loads = tuple(replace(load, generated=500) for load in loads)
    live.clock_offset_s += 1.0
    assert varied([live.view(0.5)]) >= simulated


def test_rates_are_known_though_all_devices_were_lent_since_the_last_computation() -> None:
    """Nothing is decided then, so that the policy asks for no view until the devices are due."""
    policy, lending = (kept := FixedPolicy("train-0", "train-1")), devices(kept)
    for generated in (0, 90):
        with lending.training("update_actor"):
            pass
        for tokens in (generated, generated + 80):
            lending.measure(RolloutObservation(tuple(replace(one, generated=tokens) for one in SEEN.replicas)))
            lending.clock_offset_s += 1.0
    with lending.training("update_actor"):
        pass
    rates = [view.devices[0].rate for view in policy.seen if view.due_in_s == 0.0]
    assert rates == [0.0, pytest.approx(80, rel=0.1), pytest.approx(80, rel=0.1)]
