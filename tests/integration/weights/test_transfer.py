"""Which hosts the weights are sent to, who keeps them there, and what the death of a receiver costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from support.actor_death import KILLED, killed_for_memory

from seamless_verl.weights.staging import StagedWeights

pytestmark = pytest.mark.integration
NODES = ["a", "a", "b", "b", "c"]  # of five workers
NEVER = object()  # the reply of a process that is stopped


def staged_at(host: str) -> StagedWeights:
    return StagedWeights(5, host, "memory", 0, b"", ())


class FakeWorker:
    """A worker at a place among NODES; `dead` has the places whose calls fail, `stopped` those that never reply."""

    def __init__(self, place: int, dead: set[int], stopped: set[int]) -> None:
        self.place, self.dead, self.stopped = place, dead, stopped
        self.node = SimpleNamespace(remote=self.asked)

    def asked(self) -> Any:
        if self.place in self.stopped:
            return NEVER
        return ray.exceptions.ActorDiedError() if self.place in self.dead else NODES[self.place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeWorker) and other.place == self.place

    def __hash__(self) -> int:
        return hash(self.place)


class FakeGroup:
    """A worker group whose replies are results."""

    def __init__(self, places: list[int], calls: list[Any]) -> None:
        self.places, self.calls, self.world_size = places, calls, len(places)

    def stage_weights(self, versions: list[int], keeps: list[bool]) -> list[Any]:
        self.calls.append(("receive", self.places, versions, keeps))
        return [staged_at(NODES[place]) if keep else None for place, keep in zip(self.places, keeps, strict=True)]

    def send_staged(self, version: int, staged: Any) -> list[Any]:
        self.calls.append(("send", version))
        return [{"bytes": 7.0}, None]

    def execute_checkpoint_engine(self, methods: list[str]) -> list[Any]:
        return methods


def result(reply: Any, timeout: float | None = None) -> Any:
    if reply is NEVER:
        assert timeout is not None, "it would be waited for without end"
        raise ray.exceptions.GetTimeoutError
    if isinstance(reply, ray.exceptions.RayError):
        raise reply
    return reply if isinstance(reply, str) else list(reply)


@pytest.fixture
def transfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A transfer to two replicas, of three workers and of two; it has the `calls` that it made, and who is `dead` or
    `stopped`."""
    from seamless_verl.weights import transfer as module

    calls, dead, stopped = list[Any](), set[int](), set[int]()
    replying = SimpleNamespace(get=result, wait=lambda replies, num_returns: (replies, []), exceptions=ray.exceptions)
    replying.kill = lambda server: calls.append(("end", server))
    monkeypatch.setattr(module, "ray", replying)
    monkeypatch.setattr(module, "group_of", lambda workers: FakeGroup([worker.place for worker in workers], calls))
    monkeypatch.setattr(module, "one_per_host", lambda reports: [one.host for one in reports if one is not None])
    made: Any = object.__new__(module.Transfer)
    made.calls, made.dead, made.stopped, made.actor_wg = calls, dead, stopped, FakeGroup([0], calls)
    made.nodes, made.keepers = {}, {}
    made.replicas = [
        SimpleNamespace(workers=[FakeWorker(place, dead, stopped) for place in places], servers=[name])
        for name, places in (("first", (0, 1, 2)), ("second", (3, 4)))
    ]
    made.build_process_group = lambda rollout: calls.append(("group", rollout.places))
    return made


@pytest.mark.parametrize(
    ("having", "received", "keeps"),
    [(["a"], [2, 3, 4], [True, False, True]), (["t"], [0, 1, 2, 3, 4], [True, False, True, False, True])],
)
def test_hosts_without_weights_are_sent_them_all_at_once_and_one_worker_of_each_keeps_them(
    transfer: Any, having: list[str], received: list[int], keeps: list[bool]
) -> None:
    staged, metrics = transfer.stage(5, [staged_at(host) for host in having])
    assert staged == [node for node in dict.fromkeys(NODES) if node not in having] and metrics == {"bytes": 7.0}
    assert transfer.calls == [("group", received), ("send", 5), ("receive", received, [5] * len(received), keeps)]


def test_nothing_is_sent_where_every_host_has_them(transfer: Any) -> None:
    assert transfer.stage(5, [staged_at(name) for name in "abc"]) == ([], {}) and transfer.calls == []


def test_a_replica_without_all_of_its_workers_gets_nothing_and_its_server_is_ended(transfer: Any) -> None:
    transfer.dead.add(1)
    staged, _ = transfer.stage(5, [])
    assert staged == ["b", "c"]
    assert transfer.calls == [
        ("end", "first"),
        ("group", [3, 4]),
        ("send", 5),
        ("receive", [3, 4], [5, 5], [True, True]),
    ]
    transfer.dead.add(4)
    assert transfer.stage(6, []) == ([], {})


def test_a_host_whose_copy_ended_with_its_worker_is_sent_another(transfer: Any) -> None:
    """The worker of another replica keeps it from then on."""
    hosts, _ = transfer.stage(5, [])
    staged = [staged_at(host) for host in hosts]
    transfer.dead.add(2)  # it kept the copy of b
    transfer.calls.clear()
    assert transfer.stage(5, staged)[0] == ["b"]
    assert transfer.calls[1:] == [("group", [3]), ("send", 5), ("receive", [3], [5], [True])]
    transfer.calls.clear()
    assert transfer.stage(5, staged) == ([], {}) and transfer.calls == [("end", "first")]


def test_a_replica_with_a_worker_that_is_stopped_gets_nothing_and_its_server_is_ended(transfer: Any) -> None:
    transfer.stopped.add(4)
    staged, _ = transfer.stage(5, [])
    assert staged == ["a", "b"] and transfer.calls[:2] == [("end", "second"), ("group", [0, 1, 2])]


def test_a_worker_that_was_killed_for_memory_is_dead(transfer: Any, caplog: pytest.LogCaptureFixture) -> None:
    transfer.replicas[0].workers[1].node = SimpleNamespace(remote=killed_for_memory)
    staged, _ = transfer.stage(5, [])
    assert staged == ["b", "c"] and transfer.calls[:2] == [("end", "first"), ("group", [3, 4])]
    assert f"a worker beside an engine is dead: {KILLED}" in caplog.messages


def test_a_worker_whose_host_is_known_to_have_the_weights_is_not_asked(transfer: Any) -> None:
    places = [[worker.place for worker, _ in transfer.without({having})] for having in ("a", "c")]
    assert places == [[2, 3, 4], [0, 1, 2, 3]]
    transfer.stopped.update(range(5))
    assert transfer.without({"a", "b", "c"}) == [] and transfer.calls == []
    assert transfer.without({"b", "c"}) == [] and transfer.calls == [("end", "first")], "the others are asked"


def test_the_servers_that_are_ended_are_those_that_were_beside_the_dead_worker(transfer: Any) -> None:
    first = transfer.replicas[0]
    transfer.dead.add(2)
    asked = first.workers[2].asked

    def started_again_meanwhile() -> Any:
        first.servers, first.workers = ["new"], [FakeWorker(place, set(), set()) for place in (0, 1, 2)]
        return asked()

    first.workers[2].node = SimpleNamespace(remote=started_again_meanwhile)
    transfer.living()
    assert transfer.calls == [("end", "first")]


def test_a_transfer_begins_again_without_the_replica_that_died_in_it(transfer: Any) -> None:
    send, failing = transfer.actor_wg.send_staged, [ray.exceptions.RayError("the connection was closed by its peer")]

    def send_once_failing(version: int, staged: Any) -> Any:
        if failing:
            transfer.dead.add(3)
            raise failing.pop()
        return send(version, staged)

    transfer.actor_wg.send_staged = send_once_failing
    staged, _ = transfer.stage(5, [])
    assert staged == ["a", "b"]
    assert [call[1] for call in transfer.calls if call[0] in ("group", "end")] == [
        [0, 1, 2, 3, 4],
        "second",
        "second",
        [0, 1, 2],
    ]


def test_a_transfer_that_fails_while_all_live_is_an_error(transfer: Any) -> None:
    def failing(version: int, staged: Any) -> Any:
        raise ray.exceptions.RayError("no route to host")

    transfer.actor_wg.send_staged = failing
    with pytest.raises(ray.exceptions.RayError, match="no route to host"):
        transfer.stage(5, [])


@pytest.mark.parametrize("keeps", [True, False])
def test_a_worker_that_keeps_nothing_still_receives_all(keeps: bool) -> None:
    import torch

    from seamless_verl.weights.staging import StagingMemory
    from seamless_verl.weights.transfer import SeamlessReplicaWorker

    buffer, received = torch.zeros(4), list[str]()

    async def receive(global_steps: int) -> AsyncIterator[tuple[str, torch.Tensor]]:
        for name in ("x", "y"):
            buffer.fill_(float(ord(name)))
            received.append(name)
            yield name, buffer

    worker: Any = object.__new__(SeamlessReplicaWorker)
    worker.staged, worker.checkpoint_engine = StagingMemory("here"), SimpleNamespace(receive_weights=receive)
    for version in (1, 2):  # the second is written in place
        staged = asyncio.run(worker.stage_weights(version, keeps))
        assert received == ["x", "y"] * version
        if keeps:
            assert {name: set(weight.tolist()) for name, weight in staged.map()} == {"x": {120.0}, "y": {121.0}}
        else:
            assert staged is None and worker.staged.file is None
    worker.staged.close()
