"""A run respects CUDA_VISIBLE_DEVICES: its memory and number of devices are those of the list."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.config import tiny_run

from seamless_verl.config import planning
from seamless_verl.config.checks import Settings, devices, find_problems
from seamless_verl.config.planning import device_memory, host_memory
from seamless_verl.resources.visible_devices import ORDER, VARIABLE, InstalledDevice

FOUR = tuple(InstalledDevice(i, f"GPU-{i}", (80 if i else 40) * 2**30) for i in range(4))
KEYS = (VARIABLE, ORDER, "trainer.n_gpus_per_node")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Four devices, of which the first one is smaller; no Ray runs."""
    for module in (devices, planning):
        monkeypatch.setattr(module, "installed_devices", lambda: FOUR)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    for name in (VARIABLE, ORDER, "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def found(folder: Path, *overrides: str) -> list[str]:
    settings = Settings.of(tiny_run(folder, "trainer.device=cuda", *overrides), devices=None, accelerator=True)
    return [str(problem) for problem in find_problems(settings) if problem.key in KEYS]


def test_the_memory_is_that_of_the_smallest_visible_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.of(tiny_run(tmp_path, "trainer.device=cuda"), devices=None, accelerator=True)
    assert device_memory(settings) == (40 * 2**30, False)
    monkeypatch.setenv(VARIABLE, "3,1")
    assert device_memory(settings) == (80 * 2**30, False)


def test_this_machines_memory_is_a_hosts_where_it_has_accelerators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "host_bytes", lambda: 7 * 10**9)
    settings = Settings.of(tiny_run(tmp_path, "trainer.device=cuda"), devices=None, accelerator=True)
    assert host_memory(settings) == 7 * 10**9
    stated = Settings.of(tiny_run(tmp_path, "seamless.host_memory_gb=9"), devices=None, accelerator=True)
    assert host_memory(stated) == 9 * 10**9
    monkeypatch.setattr(planning, "installed_devices", lambda: ())
    assert host_memory(settings) is None


def test_more_devices_than_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(tmp_path, "trainer.n_gpus_per_node=4") == []
    assert "and there are 4" in found(tmp_path, "trainer.n_gpus_per_node=5")[0]
    monkeypatch.setenv(VARIABLE, "1,2")
    monkeypatch.setenv(ORDER, "PCI_BUS_ID")
    (refusal,) = found(tmp_path, "trainer.n_gpus_per_node=4")
    assert "the run needs 4 devices (trainer 4) and there are 2 in CUDA_VISIBLE_DEVICES=1,2" in refusal
    assert found(tmp_path, "trainer.n_gpus_per_node=4", "+ray_kwargs.ray_init.num_gpus=4") == []


def test_a_cluster_that_runs_has_devices_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert found(tmp_path, "trainer.n_gpus_per_node=8") == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.setenv(VARIABLE, "")  # Ray sets it so for a job's driver, which needs no device
    assert found(tmp_path, "trainer.n_gpus_per_node=8") == []


def test_a_list_that_cannot_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0,MIG-1")
    (refusal,) = found(tmp_path)
    assert "CUDA_VISIBLE_DEVICES='0,MIG-1': MIG-1 is a part of a device (MIG)" in refusal


def test_unlike_devices_by_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1,2")
    (warning,) = found(tmp_path)
    assert warning.endswith("Set CUDA_DEVICE_ORDER=PCI_BUS_ID")
