"""Devices as a lending policy sees them, from what the data planes observe."""

from __future__ import annotations

from seamless_verl.resources.lending.policy import Demand, DeviceView, Tag, Use
from seamless_verl.rollout.observation import ReplicaLoad, RolloutObservation, merged
from seamless_verl.trainer.lending import DeviceViews, RunDevices, TrainingProgress


def look(views: DeviceViews, load: ReplicaLoad, now: float, *, generates: bool = True) -> DeviceView:
    """The one device of the replica `r`."""
    views.observe = lambda late: RolloutObservation((load,), 0, 0)
    (seen,), _ = views.look(set() if generates else {"r"}, TrainingProgress(Demand(0, 1, 1), 0, 0), now)
    return seen


def views_of_one() -> DeviceViews:
    return DeviceViews(RunDevices({"r": ("train-0",)}, {}, ("train-0",)), lambda late: RolloutObservation((), 0, 0))


def test_a_rate_is_measured_while_the_replica_generates() -> None:
    views = views_of_one()

    def measure(tokens: int, now: float, generates: bool = True) -> float:
        return look(views, ReplicaLoad("r", running=4, generated=tokens), now, generates=generates).rate

    assert measure(100, 10.0) == 0.0, "nothing is known yet"
    assert measure(150, 10.5) == 0.0, "too short: calls report their tokens in pieces"
    assert measure(900, 12.0) == 400.0
    assert measure(910, 12.6) == 400.0, "the last one, while the next is too short"
    assert measure(910, 13.0, generates=False) == 0.0
    assert measure(910, 20.0) == 400.0, "training's time does not count"
    assert measure(1010, 21.0) == 100.0
    assert measure(5, 22.0) == 100.0, "its data plane was restarted, and counts from 0"
    assert measure(205, 23.0) == 200.0


def test_the_longest_call_takes_its_tokens_at_the_speed_of_one_call() -> None:
    views = views_of_one()
    assert look(views, ReplicaLoad("r", running=4, generated=0, longest=50.0), 0.0).longest_s == 0.0
    assert look(views, ReplicaLoad("r", running=4, generated=80, longest=50.0), 1.0).longest_s == 50.0 / (80 / 4)


def test_all_devices_are_seen_with_their_tags_and_the_calls_that_may_come() -> None:
    observed = list[list[str]]()
    loads = (ReplicaLoad("a", running=3, urgent=1, slots=8), ReplicaLoad("b", running=6, slots=8))

    def observe(late: object) -> RolloutObservation:
        observed.append(list(late))  # type: ignore[call-overload]
        return RolloutObservation(loads, waiting=2, finished=9)

    devices = RunDevices({"a": ("train-0", "train-1")}, {"b": ("rollout-0",)}, ("train-0", "train-1", "train-2"))
    progress = TrainingProgress(Demand(4, 4, 8), trained=1, update=0, late=("u",), unfinished=16)
    seen, demand = DeviceViews(devices, observe).look({"a"}, progress, 0.0)
    assert observed == [["u"]]
    assert [(one.device_id, one.use, one.running, one.urgent) for one in seen] == [
        ("train-0", Use.TRAIN, 3, 1),
        ("train-1", Use.TRAIN, 3, 1),
        ("rollout-0", Use.ROLLOUT, 6, 0),
        ("train-2", Use.TRAIN, 0, 0),
    ]
    assert [one.lendable for one in seen] == [True, True, False, False]
    assert seen[2].tags == {Tag.ROLLOUT} and seen[3].tags == {Tag.TRAIN}
    assert demand == Demand(4, 4, 8, held=True, waiting=2, coming=16 - 3 - 6 - 2, finished=9)


def test_what_several_data_planes_see_adds_up() -> None:
    one = RolloutObservation((ReplicaLoad("a", 1, 1, 4, 10, 5.0), ReplicaLoad("b", 2, 0, 4, 20, 1.0)), 3, 7)
    other = RolloutObservation((ReplicaLoad("a", 2, 0, 4, 30, 9.0),), 1, 0)
    both = merged([one, other])
    assert both == RolloutObservation((ReplicaLoad("a", 3, 1, 8, 40, 9.0), ReplicaLoad("b", 2, 0, 4, 20, 1.0)), 4, 7)
    assert both.of("c") == ReplicaLoad("c")
