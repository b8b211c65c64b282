"""The scale bench's arithmetic, and the numbers that it refuses."""

from __future__ import annotations

from resource import RLIMIT_NOFILE, getrlimit

import pytest

from seamless_verl.errors import ConfigError
from seamless_verl.tools.bench.load import Pacing
from seamless_verl.tools.bench.scale import HEADER, SPARE_FILES, Served, SessionLoad, Work, check_sizes

FILES = getrlimit(RLIMIT_NOFILE)[0]


def test_a_turn_is_reply_and_tool() -> None:
    assert Work(5, 10.0, Pacing("real", 64, 16, 0.32)).turn_s == pytest.approx(4 * 0.32 + 10.0)


def row(shards: int, cores: int) -> SessionLoad:
    return SessionLoad(
        shards=shards,
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
