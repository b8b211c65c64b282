"""Which signals end the run that is being made, and how its log is read."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from seamless_verl.tools.compare.running import Tail, handled, one_a_step


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_ends_a_run_unless_nohup_is_before_it(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        assert set(handled()) == {signal.SIGTERM, signal.SIGINT} | (set() if ignored else {signal.SIGHUP})
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    assert tail.read() == []
    with tail.path.open("ab", buffering=0) as file:
        file.write(b"one\ntw")
        assert [line for _, line in tail.read()] == [b"one"]
        assert tail.read() == []
        file.write(b"o\nthree\n")
        assert [line for _, line in tail.read()] == [b"two", b"three"]
        assert tail.read() == []


def test_a_validation_that_is_logged_after_its_step_is_no_step_of_its_own() -> None:
    logged = [
        {"step": 1, "at": 1.0, "data": {"a": 1}},
        {"step": 2, "at": 2.0, "data": {"a": 2}},
        {"step": 2, "at": 2.5, "data": {"validation": 0.5}},
    ]
    assert one_a_step(logged) == [logged[0], {"step": 2, "at": 2.0, "data": {"validation": 0.5, "a": 2}}]
