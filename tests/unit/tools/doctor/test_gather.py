"""What the doctor reads of the system's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.doctor.gather import (
    gather,
    mount_of,
    processor_flags,
    supervisor_of,
)


def mount(place: str, kind: str, options: str = "rw") -> SimpleNamespace:
    return SimpleNamespace(mountpoint=place, fstype=kind, opts=options)


MOUNTS = [
    mount("/", "ext4", "rw,relatime"),
    mount("/tmp", "tmpfs", "rw,noexec"),
    mount("/tmp/shared data", "nfs4"),
    mount("/temporary", "tmpfs"),
]


def test_the_mount_of_a_path_is_the_innermost_and_the_latest() -> None:
    assert mount_of(MOUNTS, "/home/u") == mount_of(MOUNTS, "/") == ("ext4", frozenset({"rw", "relatime"}))
    assert mount_of(MOUNTS, "/tmp/a/b") == ("tmpfs", frozenset({"rw", "noexec"}))
    assert mount_of(MOUNTS, "/tmp/shared data") == ("nfs4", frozenset({"rw"}))
    assert mount_of([], "/tmp") == ("", frozenset())
    assert mount_of([*MOUNTS, mount("/tmp", "overlay")], "/tmp/a")[0] == "overlay"


def test_a_folder_that_may_not_be_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--folder=.*cannot be read: File name too long"):
        gather(tmp_path / ("x" * 300) / "run")


def test_flags_of_the_processor() -> None:
    cpuinfo = "processor\t: 0\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    assert processor_flags(cpuinfo) == {"fpu", "avx2", "avx512f"}
    assert processor_flags("Features : neon") == set()


@dataclass(frozen=True)
class FakeProcess:
    """A process with the command lines of its parents, the nearest first; "" is one that has ended."""

    above: Sequence[str] = ()
    pid: int = 0
    line: str = ""

    def parents(self) -> list[FakeProcess]:
        return [FakeProcess(pid=10 - i, line=line) for i, line in enumerate(self.above)]

    def cmdline(self) -> list[str]:
        if not self.line:
            raise psutil.NoSuchProcess(self.pid)
        return self.line.split()


JOB = "python -m seamless_verl.main_ppo a=1"


@pytest.mark.parametrize(
    ("above", "expected"),
    [
        ([JOB, JOB, "bash run.sh", "init"], 9),
        ([JOB, "python -m seamless_verl.cli compare x", "bash"], 10),
        (["python /x/seamless_verl/main_ppo.py a=1", "bash"], 10),
        (["python mine.py", "vim seamless_verl.main_ppo.txt", "init"], None),
        ([JOB, "", "bash"], 10),
        ([], None),
    ],
)
def test_the_supervisor_of_a_run_is_the_uppermost_parent_with_our_job(above: list[str], expected: int | None) -> None:
    assert supervisor_of(cast(Any, FakeProcess(above))) == expected
