"""Device time with fake processes: a dead replica generates no longer than until its last report."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from support.ledger import Clock

from seamless_verl.resources.ledger.activity import Activity, DeviceUse, NodeActivity
from seamless_verl.trainer import device_time as module
from seamless_verl.trainer.device_time import DeviceTime, LostSource, unused_path

NODE, REPLICA, DEVICE = "node-0", "replica-0", "rollout-0"


class Run:
    """A run with one replica, which generates from its beginning on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.lost, self.silent = Clock(), False, False
        self.nvml_busy: tuple[float, ...] = ()
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.clock))
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: NODE))
        self.replica = Activity(REPLICA, [DEVICE], clock=self.clock)
        self.device_time = DeviceTime(folder, [DEVICE], self.collect)
        self.device_time.control = Activity("trainer", [DEVICE], clock=self.clock)
        self.device_time.begin()
        self.replica.begin(DeviceUse.ROLLOUT)

    def collect(self) -> Iterable[NodeActivity | LostSource]:
        if self.lost:
            return [LostSource(REPLICA)]
        return [] if self.silent else [NodeActivity(self.replica.take(), NODE, self.nvml_busy)]

    def close(self, now: float) -> dict[DeviceUse, float]:
        """Closes a step at this time; returns the seconds of each kind so far."""
        self.clock.now = now
        self.device_time.close(f"until {now}")
        assert self.device_time.ledger is not None
        return self.device_time.ledger.seconds[DEVICE]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    made = Run(tmp_path, monkeypatch)
    return made


def test_a_dead_replica_is_not_counted_as_generating_after_its_last_report(run: Run) -> None:
    assert run.close(10.0)[DeviceUse.ROLLOUT] == 10.0
    run.lost = True
    for now in (30.0, 40.0):
        seconds = run.close(now)
        assert seconds[DeviceUse.ROLLOUT] == 10.0 and seconds[DeviceUse.IDLE] == now - 10.0


def test_time_that_was_counted_before_the_loss_is_counted_anew(run: Run) -> None:
    run.close(10.0)
    run.silent = True
    assert run.close(30.0)[DeviceUse.ROLLOUT] == 30.0, "a replica without a report goes on with what it did"
    run.lost = True
    seconds = run.close(40.0)
    assert seconds[DeviceUse.ROLLOUT] == 10.0 and seconds[DeviceUse.IDLE] == 30.0


def test_the_idle_share_is_that_of_the_last_period(run: Run) -> None:
    assert run.device_time.idle_share([DEVICE]) == 0, "none was closed"
    run.close(10.0)
    assert run.device_time.idle_share([DEVICE]) == run.device_time.idle_share([]) == 0
    run.lost = True
    run.close(20.0)
    assert run.device_time.idle_share([DEVICE]) == 1


def test_a_replica_that_reports_again_is_counted_again(run: Run) -> None:
    run.close(10.0)
    run.lost = True
    run.close(20.0)
    run.lost = False
    run.replica = Activity(REPLICA, [DEVICE], clock=run.clock)
    run.replica.begin(DeviceUse.ROLLOUT)
    assert run.close(25.0)[DeviceUse.ROLLOUT] == 15.0


def test_a_run_that_never_began_has_no_metrics_and_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: NODE))
    device_time = DeviceTime(tmp_path, [DEVICE], list)
    assert device_time.close("step 1") == {} and device_time.finish() is None


def test_a_resumed_run_keeps_its_earlier_files(tmp_path: Path) -> None:
    for name in ("devices.json", "devices-2.json", "devices-3.json"):
        path = unused_path(tmp_path, "devices", ".json")
        assert path.name == name
        path.touch()


def test_the_drivers_account_is_a_metric_of_its_own(run: Run) -> None:
    run.nvml_busy = (0.5, 1.0)
    run.clock.now = 10.0
    metrics = run.device_time.close("one")
    assert metrics["devices/nvml_busy"] == 0.75 and metrics["seamless/device/rollout_share"] == 1.0
    run.nvml_busy = ()
    run.clock.now = 20.0
    assert "devices/nvml_busy" not in run.device_time.close("two")
