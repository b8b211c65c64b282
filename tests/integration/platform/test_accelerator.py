"""What runs on accelerators alone, with fakes for the device module: the order of its calls, and who waits for whom."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from seamless_verl.config.schema import Handover
from seamless_verl.replica import server, worker_extension
from seamless_verl.replica.load_plan import PlanCache
from seamless_verl.replica.worker_extension import MappedReceiver, SeamlessWorkerExtension, no_preparation
from seamless_verl.resources.ledger.activity import Activity
from seamless_verl.resources.tags import Layout
from seamless_verl.trainer import setup, workers


class FakeDevice:
    """torch.cuda's part that we call; `calls` has the names, in their order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()
    for module in (workers, worker_extension):
        monkeypatch.setattr(module, "get_torch_device", lambda: fake)
    return fake


def test_the_trainer_gives_cached_memory_back_when_its_kernels_have_ended(device: FakeDevice) -> None:
    workers.SeamlessActorWorker.free_cached_memory(SimpleNamespace())
    assert device.calls == ["synchronize", "empty_cache"]


def test_each_bucket_is_on_the_device_until_its_copies_have_ended(device: FakeDevice) -> None:
    weights = [(name, torch.zeros(10)) for name in "abc"]  # 40 bytes each
    receiver = MappedReceiver(weights, 80, PlanCache(attempted=True), [], "", torch.device("cpu"), True)
    seen: list[tuple[list[str], bool, int]] = []
    receiver.receive_weights(lambda bucket, last: seen.append(([name for name, _ in bucket], last, len(device.calls))))
    assert seen == [(["a", "b"], False, 0), (["c"], True, 1)]
    assert device.calls == ["synchronize"] * 3 + ["empty_cache"]


def test_a_worker_that_vllm_puts_to_sleep_keeps_nothing_to_drop() -> None:
    SeamlessWorkerExtension.drop_memory(SimpleNamespace(resident=None))
    no_preparation([], planned=True)


def launch_of(device: str, layout: Layout, launched: list[str]) -> Any:
    """The launch of a run."""
    placement = setup.Placement(layout, None, Handover.RESIDENT, device != "cpu")
    return setup.ServerLaunch(OmegaConf.create({}), placement, None, lambda: launched.append("rewards"))


@pytest.mark.parametrize(
    ("device", "layout", "at_once"),
    [("cuda", Layout.COLOCATED, False), ("cuda", Layout.DISAGGREGATED, True), ("cpu", Layout.COLOCATED, True)],
)
def test_replicas_on_the_trainers_accelerators_start_when_it_has_taken_its_memory(
    device: str, layout: Layout, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []
    servers = SimpleNamespace(open_balancer=lambda: None, launch=lambda: launched.append("servers"))
    monkeypatch.setattr(setup, "SeamlessServers", lambda *_: servers)
    made = launch_of(device, layout, launched)
    made.workers_exist({"actor_rollout": SimpleNamespace(workers=[1, 2], world_size=2)})
    if at_once:
        made.result()
    assert launched == (["servers"] if at_once else [])
    made.create().result()
    assert sorted(launched) == ["rewards", "servers"]


@pytest.mark.parametrize("awaited", [True, False])
def test_nothing_is_freed_before_the_engines_have_measured_memory(awaited: bool) -> None:
    """verl loads the checkpoint when it has got the replicas, and that frees memory of the device."""
    order: list[str] = []
    finishing = threading.Event()

    def launch() -> Any:
        if awaited:
            finishing.set()
        finishing.wait(30)
        order.append("launched")
        return SimpleNamespace(placed=[])

    made = launch_of("cuda" if awaited else "cpu", Layout.COLOCATED, [])
    made.servers = SimpleNamespace(launch=launch)
    assert made.create().get_replicas() == []
    order.append("checkpoint loaded")
    finishing.set()
    assert order[0] == ("launched" if awaited else "checkpoint loaded")


async def test_a_replicas_report_has_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "node_id", lambda: "node-0")
    replica = SimpleNamespace(activity=Activity("replica-0", ["train-0"]), utilization=None)
    assert (await server.SeamlessServer.take_activity(replica)).nvml_busy == ()
    replica.utilization = SimpleNamespace(take=lambda: (0.25,))
    assert (await server.SeamlessServer.take_activity(replica)).nvml_busy == (0.25,)
