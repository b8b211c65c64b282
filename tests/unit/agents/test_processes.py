"""Processes of other users: /proc may hide them, and they cannot be signalled. Neither fails a command's session."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from seamless_verl.agents import processes
from seamless_verl.agents.processes import ProcessEntry, end_processes, processes_of, read_process

MARK = b"SEAMLESS_RUN_MARK=of-no-process"


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], None]:
    """Has /proc refuse what it says of some processes, as with hidepid=1."""
    real = builtins.open

    def hide(hidden: Callable[[int], bool]) -> None:
        def refuse(path: Any, *args: Any, **kwargs: Any) -> Any:
            words = str(path).split("/")
            if words[:2] == ["", "proc"] and words[2].isdigit() and hidden(int(words[2])):
                raise PermissionError(1, "Operation not permitted", path)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(builtins, "open", refuse)

    return hide


def test_hidden_processes_are_passed_over(hide: Callable[[Callable[[int], bool]], None]) -> None:
    me = os.getpid()
    hide(lambda pid: pid != me)
    assert read_process(os.getppid()) is None
    assert [process.pid for process in processes_of(me, MARK)] == [me]


def test_children_of_a_hidden_first_process_are_found(hide: Callable[[Callable[[int], bool]], None]) -> None:
    """As of sudo, which takes another user's rights."""
    parent = os.getppid()
    hide(lambda pid: pid == parent)
    found = {process.pid for process in processes_of(parent, MARK)}
    assert os.getpid() in found and parent not in found


def test_a_group_that_may_not_be_signalled_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    scans: Iterator[list[ProcessEntry]] = iter([[ProcessEntry(0, 1, 1, 0, False)], [], []])

    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(processes, "processes_of", lambda leader, mark: next(scans))
    monkeypatch.setattr(processes, "handles_of", lambda found, opened: iter(()))
    monkeypatch.setattr(os, "killpg", refuse)
    assert end_processes(0, MARK, grace_s=0.0) == []
