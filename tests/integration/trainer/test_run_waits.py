"""The graph of a run's waits is put together from processes that reply, and from those that do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from support.paths import child_environment

from seamless_verl.data_plane.waits import PlaneWaits
from seamless_verl.runtime.waits import QUEUE, TRAINER, Blocked, Wait, WaitKind, follow
from seamless_verl.trainer.run_waits import RunWaits, stacks_of

pytestmark = pytest.mark.integration
GROUP = Wait(WaitKind.GROUP, "group u1", 50.0, what="has 1 sessions that run without a call")
CALL = Wait(WaitKind.CALL, "call c9", 44.0, ("replica-1",))
REPLICA = Wait(WaitKind.REPLICA, "replica-1", 43.0, what="has given none of its calls a token")


def actor_classes() -> tuple[Any, Any]:
    """Made in here, they are sent to the actors' processes, which cannot import this file."""

    class Silent:
        """Who asks it waits until `reply`."""

        def __init__(self) -> None:
            self.may_reply = threading.Event()

        def reply(self) -> None:
            self.may_reply.set()

        def waits(self) -> list[Any]:
            self.may_reply.wait()
            return []

    class Replying:
        def __init__(self, reply: Any) -> None:
            self.reply = reply

        def waits(self) -> Any:
            return self.reply

    return ray.remote(Silent).options(num_cpus=0, max_concurrency=16), ray.remote(Replying).options(num_cpus=0)


@pytest.fixture(scope="module")
def actors() -> Iterator[dict[str, Any]]:
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": child_environment()})
    silent, replying = actor_classes()
    plane = PlaneWaits([Wait(WaitKind.GROUP, GROUP.name, 0.0, (CALL.name,)), CALL, REPLICA])
    try:
        made = {
            "data plane": replying.remote(plane),
            "agent loop worker 0": replying.remote([GROUP]),
            "agent loop worker 1": silent.remote(),
        }
        ray.get([actor.__ray_ready__.remote() for actor in made.values()])
        yield made
    finally:
        ray.shutdown()


def waits_of(actors: dict[str, Any], *, stage: str = "waiting for groups, step 3", **more: Any) -> RunWaits:
    parts: dict[str, Any] = {
        "stage": lambda: (stage, 60.0),
        "planes": lambda: {name: actor for name, actor in actors.items() if name == "data plane"},
        "workers": lambda: {name: actor for name, actor in actors.items() if name != "data plane"},
        "silent_s": dict,
        "training": lambda: ["actor worker 0"],
        "commit": lambda: None,
        "outstanding": lambda: ["u1", "u2"],
    }
    return RunWaits(**(parts | {name: lambda value=value: value for name, value in more.items()}))


def blocked(waits: RunWaits) -> Blocked:
    nodes = {wait.name: wait for wait in waits.collect()}
    return follow(nodes, nodes[TRAINER], {WaitKind.REPLICA: 40.0, WaitKind.ACTOR: 30.0, WaitKind.QUEUE: 20.0})


def test_what_planes_and_workers_say_of_a_group_is_one_chain(actors: dict[str, Any]) -> None:
    waits = waits_of(actors)
    found = blocked(waits)
    assert [wait.name for wait in found.chain] == [TRAINER, "group u1", "call c9", "replica-1"]
    assert found.chain[1].waited_s == 50.0, "its age is known to the worker"
    assert waits.concerned(found) == {"replica-1", "call c9"}
    assert waits.hosts["group u1"] == "agent loop worker 0"


def test_a_replica_is_not_blamed_while_some_data_plane_does_not_reply(actors: dict[str, Any]) -> None:
    """Its tokens may go to the calls of that one."""
    planes = {"data plane": actors["data plane"], "data plane 1": actors["agent loop worker 1"]}
    kinds = {wait.kind for wait in waits_of({}, planes=planes).collect()}
    assert WaitKind.REPLICA not in kinds and {WaitKind.CALL, WaitKind.ACTOR} <= kinds


def test_a_group_that_nobody_who_replies_knows_waits_for_the_worker_that_does_not(actors: dict[str, Any]) -> None:
    waits = waits_of(actors)
    nodes = {wait.name: wait for wait in waits.collect()}
    assert nodes["group u2"].on == ("agent loop worker 1",)
    first = nodes["agent loop worker 1"]
    assert (first.kind, first.what) == (WaitKind.ACTOR, "has not replied")
    time.sleep(0.5)
    later = {wait.name: wait for wait in waits.collect()}["agent loop worker 1"]
    assert later.waited_s >= first.waited_s + 0.5, "it counts from the first question"
    ray.get(actors["agent loop worker 1"].reply.remote())
    ray.get(actors["agent loop worker 1"].waits.remote())  # now it replies to all
    limit = time.monotonic() + 30.0
    while "agent loop worker 1" in {wait.name for wait in waits.collect()}:  # a busy machine's reply may be late again
        assert time.monotonic() < limit
    assert waits.asked == {}


def test_actors_that_are_known_to_be_silent_are_what_the_trainer_waits_for() -> None:
    found = blocked(waits_of({}, silent_s={"TransferQueue storage 0": 70.0, "actor worker 0": 90.0}))
    assert str(found) == (
        "the trainer (waiting for groups, step 3) waits for TransferQueue storage 0, which has not replied for 70 s"
    )
    computing = waits_of({}, stage="computing, step 3", silent_s={"actor worker 0": 90.0}, commit=(3, 80.0))
    assert [wait.name for wait in blocked(computing).chain] == [TRAINER, "actor worker 0"]
    nodes = {wait.name: wait for wait in computing.collect()}
    assert nodes["the commit of version 3"].waited_s == 80.0 and QUEUE not in nodes


def test_the_stacks_are_those_of_the_processes_concerned(actors: dict[str, Any]) -> None:
    text = stacks_of({"data plane", TRAINER, "call c9"}, actors)
    assert text.startswith(f"--- {TRAINER}\nthread ") and "\n--- data plane\nthread " in text
    assert "agent loop worker" not in text and "own_stacks" in text
