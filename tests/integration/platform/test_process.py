"""The CPU platform in processes of their own: cores, what is imported, and the installed torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from seamless_verl.resources.visible_devices import installed_devices

pytestmark = pytest.mark.integration


def test_pinning_moves_threads_that_already_run() -> None:
    """In a process of its own, since pinning a test run would slow what follows."""
    script = """
import os, threading
from seamless_verl.platform.cores import pin_process
release, started = threading.Event(), threading.Barrier(3)
def wait():
    started.wait(); release.wait()
threads = [threading.Thread(target=wait) for _ in range(2)]
[thread.start() for thread in threads]
started.wait()
core = max(os.sched_getaffinity(0))
pin_process({core})
assert all(os.sched_getaffinity(t.native_id) == {core} for t in threads)
assert os.sched_getaffinity(0) == {core}
release.set()
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_entry_points_import_nothing_heavy() -> None:
    """What vLLM imports in every process, also on an accelerator."""
    script = """
import sys
import seamless_verl.platform.vllm_cpu, seamless_verl.platform.cores
heavy = {"torch", "vllm", "verl", "ray", "numpy", "seamless_verl.platform.vllm"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# There is no accelerator to test on, so vllm.platforms answers here as it would beside one.
ACCELERATED = """
import sys, types
vllm, platforms = types.ModuleType("vllm"), types.ModuleType("vllm.platforms")
platforms.current_platform = types.SimpleNamespace(is_cpu=lambda: False)
platforms.cpu_platform_plugin = lambda: None
sys.modules |= {"vllm": vllm, "vllm.platforms": platforms}
from seamless_verl.platform.vllm_cpu import host_platform, register
before = set(sys.modules)
assert host_platform() is None
register()
assert set(sys.modules) == before, set(sys.modules) - before
assert not {"torch", "verl", "ray", "numpy"} & before
"""


def test_beside_an_accelerator_nothing_happens_and_nothing_is_imported() -> None:
    subprocess.run([sys.executable, "-c", ACCELERATED], check=True)


def test_the_installed_torch_says_the_same_as_its_text() -> None:
    import torch

    code = "from seamless_verl.platform.detect import torch_is_for_accelerators as t\nimport sys\n"
    code += "text = t()\nassert 'torch' not in sys.modules\nprint(text)"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip() == str(bool(torch.version.cuda or torch.version.hip))


def test_verl_finds_the_cpu_by_itself_only_with_a_torch_built_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    cpu = pytest.importorskip("seamless_verl.platform.cpu").PlatformCPU()
    monkeypatch.setattr(cpu, "check_smi_command", lambda command: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, hip, available in ((None, None, True), ("13.0", None, False), (None, "7.1", False)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert cpu.is_platform_available() is available


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo 0, GPU-a, 81559, Disabled; echo '1, GPU-b, 40536, [N/A]'", [81559 * 2**20, 40536 * 2**20]),
        ("exit 9", []),
        ("echo no device", []),
    ],
)
def test_accelerator_memory(script: str, found: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{script}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert [device.memory_bytes for device in installed_devices()] == found
