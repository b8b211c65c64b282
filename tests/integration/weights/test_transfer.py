"""Which hosts the weights are sent to, and who keeps them there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.integration
NODES = ["a", "a", "b", "b", "c"]  # of five workers


class FakeGroup:
    """A worker group whose replies are results."""

    def __init__(self, places: list[int], calls: list[Any]) -> None:
        self.places, self.calls, self.world_size = places, calls, len(places)

    def node(self) -> list[str]:
        return [NODES[place] for place in self.places]

    def stage_weights(self, versions: list[int], keeps: list[bool]) -> list[Any]:
        self.calls.append(("receive", self.places, versions, keeps))
        return [
            SimpleNamespace(host=NODES[place]) if keep else None for place, keep in zip(self.places, keeps, strict=True)
        ]

    def send_staged(self, version: int, staged: Any) -> list[Any]:
        self.calls.append(("send", version))
        return [{"bytes": 7.0}, None]

    def execute_checkpoint_engine(self, methods: list[str]) -> list[Any]:
        return methods


@pytest.mark.parametrize(
    ("having", "received", "keeps"),
    [(["a"], [2, 3, 4], [True, False, True]), (["t"], [0, 1, 2, 3, 4], [True, False, True, False, True])],
)
def test_hosts_without_weights_are_sent_them_all_at_once_and_one_worker_of_each_keeps_them(
    monkeypatch: pytest.MonkeyPatch, having: list[str], received: list[int], keeps: list[bool]
) -> None:
    from seamless_verl.weights import transfer as module

    calls: list[Any] = []
    monkeypatch.setattr(module, "group_of", lambda workers: FakeGroup(list(workers), calls))
    monkeypatch.setattr(module, "ray", SimpleNamespace(get=list))
    monkeypatch.setattr(module, "one_per_host", lambda reports: [one.host for one in reports if one is not None])
    made: Any = object.__new__(module.Transfer)
    made.actor_wg, made.replicas = (
        FakeGroup([0], calls),
        [SimpleNamespace(workers=[0, 1, 2]), SimpleNamespace(workers=[3, 4])],
    )
    made.build_process_group = lambda rollout: calls.append(("group", rollout.places))
    staged, metrics = made.stage(5, [SimpleNamespace(host=host) for host in having])
    assert staged == [node for node in dict.fromkeys(NODES) if node not in having] and metrics == {"bytes": 7.0}
    assert calls == [("group", received), ("send", 5), ("receive", received, [5] * len(received), keeps)]


def test_nothing_is_sent_where_every_host_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from seamless_verl.weights import transfer as module

    calls: list[Any] = []
    monkeypatch.setattr(module, "group_of", lambda workers: FakeGroup(list(workers), calls))
    made: Any = object.__new__(module.Transfer)
    made.actor_wg, made.replicas = None, [SimpleNamespace(workers=[0, 1]), SimpleNamespace(workers=[2])]
    assert made.stage(5, [SimpleNamespace(host="a"), SimpleNamespace(host="b")]) == ([], {}) and calls == []


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
