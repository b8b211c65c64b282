"""The gloo groups of a process share one device, and so one thread that wakes up all the time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
GROUPS = r'''
import os
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import ProcessGroupGloo, all_reduce, distributed_c10d, init_process_group, new_group

from seamless_verl.platform.process_group import share_gloo_devices


def loops(groups):
    """The threads of gloo's devices, which have a name only in newer torch: all new ones but two a group and device."""
    return len(threads()) - before - 2 * devices * groups


def threads():
    return list(Path("/proc/self/task").iterdir())


def kept(group):
    backend = group._get_backend(torch.device("cpu"))
    return isinstance(backend, ProcessGroupGloo) and backend.options._timeout == timedelta(seconds=77)


devices, before = int(os.environ['DEVICES']), len(threads())
init_process_group("cpu:gloo", init_method=f"file://{os.environ['MEETING']}", rank=0, world_size=1)
new_group([0])
apart = loops(2)
share_gloo_devices()
share_gloo_devices()
groups = [new_group([0], timeout=timedelta(seconds=77)) for _ in range(5)]
for group in groups:
    all_reduce(torch.ones(3), group=group)
print(apart, loops(7) - apart, all(map(kept, groups)))
'''


@pytest.mark.parametrize("interfaces", ["", "lo", "lo,lo"])
def test_groups_made_after_it_share_their_devices_and_keep_their_deadline(
    interfaces: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEETING", f"{tmp_path}/meeting")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interfaces:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    devices = len(interfaces.split(","))
    monkeypatch.setenv("DEVICES", str(devices))
    done = subprocess.run([sys.executable, "-c", GROUPS], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(2 * devices), str(devices), "True"], done.stderr
