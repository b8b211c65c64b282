"""Find and end every process of one command, also those that left its process group. Linux.

A process is one of the command's when it is in the session its first process opened, or carries its mark in
the environment it was started with, or descends from one that is. A daemon that forks twice, opens a session
of its own and is adopted by init still has the mark; only one that also clears its environment escapes.

Invariants: the first process has not been waited for, so its id, its group's and its session's cannot be given
to another; a signal goes through a descriptor whose process was recognized after it was opened. So nothing
foreign is ever signalled. This module blocks: it waits on descriptors, never for a fixed time.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass

KILL_S = 5.0  # for killed processes to be gone; one that waits for a device may take for ever
ENDED = (b"Z", b"X")


@dataclass(frozen=True)
class Seen:
    """A process as /proc showed it; `started` (clock ticks since boot) tells it from a later one of the same id."""

    pid: int
    parent: int
    session: int
    started: int
    ended: bool


def seen(pid: int) -> Seen | None:
    """The process, or None where there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return Seen(pid, int(words[1]), int(words[3]), int(words[19]), words[0] in ENDED)


def carries(pid: int, mark: bytes) -> bool:
    """Whether the process was started with the variable `mark` (NAME=value)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:  # gone, or another user's
        return False


def members(leader: int, mark: bytes) -> list[Seen]:
    """All running processes of the command whose first process, not yet waited for, is `leader`."""
    first = seen(leader)
    assert first is not None, "the first process must not have been waited for"
    found = [process for name in os.listdir("/proc") if name.isdigit() and (process := seen(int(name)))]
    younger = [process for process in found if process.started >= first.started]  # none of its can be older
    ours = {p.pid for p in younger if p.session == leader or carries(p.pid, mark)}
    while more := {p.pid for p in younger if p.parent in ours} - ours:
        ours |= more
    return [process for process in younger if process.pid in ours and not process.ended]


def end_processes(leader: int, mark: bytes, grace_s: float) -> list[int]:
    """Ask all of the command's processes to end, kill what is left `grace_s` seconds later; returns who still runs.

    Over only when two looks in a row find none: one at the moment of its exec shows no environment.
    """
    grace_over = time.monotonic() + grace_s
    give_up = grace_over + KILL_S
    asked: set[tuple[int, int]] = set()
    while found := members(leader, mark) or members(leader, mark):
        now = time.monotonic()
        if now > give_up:
            return [process.pid for process in found]
        kill = now >= grace_over
        if kill:  # at once for the whole group, which no fork can outrun
            with suppress(ProcessLookupError):
                os.killpg(leader, signal.SIGKILL)
        with ExitStack() as opened:
            handles = list(handles_of(found, opened))
            for process, handle in handles:
                if kill or (process.pid, process.started) not in asked:
                    send(handle, signal.SIGKILL if kill else signal.SIGTERM)
            wait_ended((handle for _, handle in handles), give_up if kill else grace_over)
        asked.update((process.pid, process.started) for process in found)
    return []


def handles_of(processes: Iterable[Seen], opened: ExitStack) -> Iterator[tuple[Seen, int]]:
    """A descriptor for each process that still is the one that was seen; `opened` closes it."""
    for process in processes:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(process.pid)
            opened.callback(os.close, handle)
            again = seen(process.pid)
            if again is not None and again.started == process.started:
                yield process, handle


def send(handle: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # gone, or it took another user's rights
        signal.pidfd_send_signal(handle, number)


def wait_ended(handles: Iterable[int], until: float) -> None:
    """Until all have ended, or the time (monotonic seconds) is over."""
    waiting = select.poll()
    left = set(handles)
    for handle in left:
        waiting.register(handle, select.POLLIN)
    while left and (rest := until - time.monotonic()) > 0:
        for handle, _ in waiting.poll(rest * 1000):
            waiting.unregister(handle)
            left.discard(handle)
