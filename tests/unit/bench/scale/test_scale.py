"""The scale bench's arithmetic, and the numbers of sessions that it refuses."""

from __future__ import annotations

from resource import RLIMIT_NOFILE, getrlimit

import pytest

from seamless_verl.bench.gateway.load import Pacing
from seamless_verl.bench.scale.__main__ import HEADER, SPARE_FILES, SessionLoad, check_processes, check_sessions
from seamless_verl.bench.scale.sessions import Served, Work
from seamless_verl.errors import ConfigError

FILES = getrlimit(RLIMIT_NOFILE)[0]


def test_a_turn_is_reply_and_tool() -> None:
    assert Work(5, 10.0, Pacing("real", 64, 16, 0.32)).turn_s == pytest.approx(4 * 0.32 + 10.0)


def test_a_row() -> None:
    row = SessionLoad(2, 100, 500, 10.0, 32_000, 0.004, 0.0301, 4.0, 100 * 2048)
    assert (row.rate, row.limit) == (50.0, 125.0)
    expected = ("2", "100", "50", "3,200", "4.0", "30.1", "8.00", "40% of 2", "125", "2")
    assert row.cells() == expected and len(expected) == len(HEADER)


def test_only_what_ends_in_the_window_counts() -> None:
    served = Served()
    for served.counting in (False, True, False):
        served.call_ended(0.5)
        served.session_ended()
    assert (served.late, served.sessions) == ([0.5], 1)


@pytest.mark.parametrize("number", [0, FILES - SPARE_FILES + 1])
def test_sessions_beyond_the_open_files_are_refused(number: int) -> None:
    with pytest.raises(ConfigError, match="ulimit -n"):
        check_sessions([1, number])


@pytest.mark.parametrize(("shards", "replicas", "key"), [([1, 0], 16, "--shards=0"), ([1], 0, "--replicas=0")])
def test_a_window_without_shards_or_engines_is_refused(shards: list[int], replicas: int, key: str) -> None:
    check_processes([1, 2], 16)
    with pytest.raises(ConfigError, match=key):
        check_processes(shards, replicas)


def test_as_many_as_there_are_files_are_not() -> None:
    check_sessions([FILES - SPARE_FILES])
