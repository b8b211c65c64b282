"""The scale bench from end to end: two shards in processes of their own, agents that come and go, nothing left.

Shares of a core are tested where a CPU cgroup can be made.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.core_share import MOUNTS, find_mount, limited_to
from seamless_verl.tools.bench.scale import main

pytestmark = [pytest.mark.integration, pytest.mark.long]
BUSY = "import os\nos.fork()\nos.write(1, b'ready\\n')\nwhile True: pass"


@pytest.fixture
def cgroups() -> Path:
    """Where CPU cgroups are made."""
    try:
        with limited_to(0.5):
            mount = find_mount(MOUNTS.read_text())
    except ConfigError as error:
        pytest.skip(str(error))
    assert mount is not None
    return mount[1]


def cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(time.user + time.system for time in times))


def group_of(pid: int, cgroups: Path) -> Path:
    (group,) = (group for group in cgroups.glob("scale-bench-*") if str(pid) in (group / "cgroup.procs").read_text())
    return group


def test_a_process_and_its_child_use_their_share_of_a_core_at_most(cgroups: Path) -> None:
    with limited_to(0.2) as limit:
        process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == process.stdout.readline() == b"ready\n"
        both = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        limit(process.pid)
        began, used = time.monotonic(), cpu_s(both)
        time.sleep(1)
        share = (cpu_s(both) - used) / (time.monotonic() - began)
        groups = {group_of(one.pid, cgroups) for one in both}
        for one in both[::-1]:
            one.kill()
        process.communicate()
    assert len(both) == 2 and 0 < share < 0.25
    (group,) = groups
    assert not group.exists()


def test_a_share_that_cannot_be_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--core-share", "1.5", "--shards", "1"]) == 2
    assert "--core-share=1.5" in capsys.readouterr().err


def test_a_group_cannot_be_made(cgroups: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS.read_text().replace(str(cgroups), str(tmp_path / "missing")))
    monkeypatch.setattr("seamless_verl.tools.bench.core_share.MOUNTS", mounts)
    with pytest.raises(ConfigError, match="Run as root"), limited_to(0.5):
        pass


@pytest.mark.parametrize("core_share", [None, 0.5])
def test_two_shards_serve_all_sessions(
    core_share: float | None, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = request.getfixturevalue("cgroups") if core_share else tmp_path
    out = tmp_path / "rows.json"
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    sizes = ["--sessions", "12", "--shards", "2", "--replicas", "2", "--tokens", "32", "--tool-s", "0.5"]
    share = ["--core-share", str(core_share)] if core_share else []
    assert main([*sizes, *share, "--turns", "2", "--seconds", "4", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())
    assert row["tokens"] == 32 * row["calls"] and row["calls"] >= 12
    assert row["core_share"] == core_share and not list(groups.glob("scale-bench-*"))
    assert row["cpu_s"] > 0 and row["agents_cpu_s"] > 0 and row["grown_bytes"] > 0 and row["late_s"] > 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["2", "12"]
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
