"""The scale bench's arithmetic, the settings of cgroups, and the numbers that it refuses."""

from __future__ import annotations

from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.core_share import find_mount, quota_settings
from seamless_verl.tools.bench.load import Pacing
from seamless_verl.tools.bench.scale import HEADER, SPARE_FILES, Served, SessionLoad, Work, check_sizes, usable_cores

FILES = getrlimit(RLIMIT_NOFILE)[0]


def test_a_turn_is_reply_and_tool() -> None:
    assert Work(5, 10.0, Pacing("real", 64, 16, 0.32)).turn_s == pytest.approx(4 * 0.32 + 10.0)


def row(shards: int, cores: float, core_share: float | None = None) -> SessionLoad:
    return SessionLoad(
        shards=shards,
        core_share=core_share,
        cores=cores,
        sessions=100,
        calls=500,
        seconds=10.0,
        tokens=32_000,
        late_s=0.004,
        late_p99_s=0.0301,
        cpu_s=4.0,
        agents_cpu_s=2.5,
        grown_bytes=100 * 2048,
    )


def test_a_row() -> None:
    load = row(shards=2, cores=2)
    assert (load.rate, load.limit) == (50.0, 125.0)
    expected = ("2", "100", "50", "3,200", "4.0", "30.1", "8.00", "20% of 2", "125", "2", "25%")
    assert load.cells() == expected and len(expected) == len(HEADER)


def test_a_row_of_shards_with_a_share_of_a_core() -> None:
    load = row(shards=2, cores=0.5, core_share=0.25)
    assert "80% of 0.5" in load.cells()
    assert load.limit == row(shards=2, cores=2).limit  # that of a whole core


@pytest.mark.parametrize(
    ("shards", "core_share", "cores", "usable"),
    [(2, None, 3, 2), (2, None, 1, 1), (2, 0.25, 1, 0.5), (2, 0.5, 1, 1), (3, 1.0, 4, 3)],
)
def test_the_cores_that_shards_may_use(shards: int, core_share: float | None, cores: int, usable: float) -> None:
    assert usable_cores(shards, core_share, cores) == usable


def test_shares_beyond_a_core_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--core-share=0\.6: 2 of 4 shards share a core here\. Give at most 0\.5"):
        usable_cores(4, 0.6, 2)


@pytest.mark.parametrize(
    ("share", "version", "settings"),
    [
        (0.25, 1, {"cpu.cfs_period_us": "20000", "cpu.cfs_quota_us": "5000"}),
        (0.25, 2, {"cpu.max": "5000 20000"}),
        (0.02, 2, {"cpu.max": "1000 50000"}),
        (1.0, 2, {"cpu.max": "20000 20000"}),
    ],
)
def test_the_quota_of_a_share(share: float, version: int, settings: dict[str, str]) -> None:
    assert quota_settings(share, version) == settings


@pytest.mark.parametrize("share", [-0.5, 0.0, 1.01, float("nan")])
def test_a_share_that_is_no_part_of_a_core_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match=r"the part of a core .* Give 0\.001 to 1"):
        usable_cores(1, share, 2)


OTHER = "10 23 0:28 / /sys/fs/cgroup rw shared:3 - tmpfs tmpfs rw,mode=755\n"
CPUSET = "13 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset\n"
VERSION_1 = "11 32 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:5 - cgroup cgroup rw,cpu,cpuacct\n"
VERSION_2 = "20 41 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mountinfo", "mount"),
    [
        (OTHER + CPUSET + VERSION_2 + VERSION_1, (1, Path("/sys/fs/cgroup/cpu"))),
        (OTHER + CPUSET + VERSION_2, (2, Path("/sys/fs/cgroup/unified"))),
        (OTHER + CPUSET, None),
    ],
)
def test_where_cgroups_are_made(mountinfo: str, mount: tuple[int, Path] | None) -> None:
    assert find_mount(mountinfo) == mount


def test_only_what_ends_in_the_window_counts() -> None:
    served = Served()
    for served.counting in (False, True, False):
        served.call_ended(0.5)
    assert served.late == [0.5]


def test_agents_have_settled_after_so_many_calls() -> None:
    served, settled = Served(settle_calls=2), []
    for _ in range(3):
        served.call_ended(0.5)
        settled.append(served.settled.is_set())
    assert settled == [False, True, True] and not served.late


@pytest.mark.parametrize("number", [0, FILES - SPARE_FILES + 1])
def test_sessions_beyond_the_open_files_are_refused(number: int) -> None:
    with pytest.raises(ConfigError, match="ulimit -n"):
        check_sizes([1, number], [1], 1)


@pytest.mark.parametrize(("shards", "replicas", "key"), [([1, 0], 16, "--shards=0"), ([1], 0, "--replicas=0")])
def test_a_window_without_shards_or_engines_is_refused(shards: list[int], replicas: int, key: str) -> None:
    check_sizes([FILES - SPARE_FILES], [1, 2], 16)
    with pytest.raises(ConfigError, match=key):
        check_sizes([1], shards, replicas)
