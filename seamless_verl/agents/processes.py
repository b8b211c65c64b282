"""Starts a command, reads its output, and ends every process of it, also those that left its process group. Linux.

A process belongs to the command when it is in the session that the first process opened, has the command's mark in the
environment it was started with, or descends from one that belongs to it. Only a daemon that clears it escapes.

Invariants:
- The first process is waited for in `Child.close` only, so that the ids of it, its group and its session stay its own.
- A signal is sent through a descriptor whose process was recognized after it was opened: no foreign process gets one.
- `written` counts the bytes read, `tail` is the last `tail_bytes` of them; nothing is read beyond the limit.

An asyncio subprocess waits for the process at once, and for the end of the pipe, which a daemon can hold open.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from seamless_verl.agents import launch
from seamless_verl.agents.limits import CommandLimits
from seamless_verl.agents.outcome import AgentStatus
from seamless_verl.agents.own_time import OwnTime

KILL_S = 5.0  # for killed processes to end; one that waits for a device may never do
ENDED = (b"Z", b"X")


@dataclass(frozen=True)
class ProcessEntry:
    """A process as /proc shows it; `started` (clock ticks since boot) distinguishes it from a later one of its id."""

    pid: int
    parent: int
    session: int
    started: int
    ended: bool


def read_process(pid: int) -> ProcessEntry | None:
    """The process, or None when it does not exist, or is another user's and /proc hides it (mounted with hidepid)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return ProcessEntry(pid, int(words[1]), int(words[3]), int(words[19]), words[0] in ENDED)


def has_mark(pid: int, mark: bytes) -> bool:
    """Whether the process was started with the environment variable `mark` (NAME=value)."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark in file.read().split(b"\0")
    except OSError:  # it ended, or belongs to another user
        return False


def processes_of(leader: int, mark: bytes) -> list[ProcessEntry]:
    """The running processes, without those that /proc hides, of the command whose first, not waited for, is
    `leader`.
    """
    first = read_process(leader)
    since = 0 if first is None else first.started  # its processes cannot be older
    found = [process for name in os.listdir("/proc") if name.isdigit() and (process := read_process(int(name)))]
    younger = [process for process in found if process.started >= since]
    ours = {leader} | {p.pid for p in younger if p.session == leader or has_mark(p.pid, mark)}
    while more := {p.pid for p in younger if p.parent in ours} - ours:
        ours |= more
    return [process for process in younger if process.pid in ours and not process.ended]


def end_processes(leader: int, mark: bytes, grace_s: float) -> list[int]:
    """Asks all processes of the command to end, kills the rest `grace_s` seconds later, returns those still running.

    It blocks. It ends when two scans in a row find none: a process shows no environment at the moment of its exec.
    """
    grace_over = time.monotonic() + grace_s
    give_up = grace_over + KILL_S
    asked: set[tuple[int, int]] = set()
    while found := processes_of(leader, mark) or processes_of(leader, mark):
        now = time.monotonic()
        if now > give_up:
            return [process.pid for process in found]
        kill = now >= grace_over
        if kill:  # the whole group at once, so that no fork escapes
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(leader, signal.SIGKILL)
        with ExitStack() as opened:
            handles = list(handles_of(found, opened))
            for process, handle in handles:
                if kill or (process.pid, process.started) not in asked:
                    send(handle, signal.SIGKILL if kill else signal.SIGTERM)
            wait_ended((handle for _, handle in handles), give_up if kill else grace_over)
        asked.update((process.pid, process.started) for process in found)
    return []


def handles_of(processes: Iterable[ProcessEntry], opened: ExitStack) -> Iterator[tuple[ProcessEntry, int]]:
    """A descriptor for each process that is still the same one; `opened` closes it."""
    for process in processes:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(process.pid)
            opened.callback(os.close, handle)
            again = read_process(process.pid)
            if again is not None and again.started == process.started:
                yield process, handle


def send(handle: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it ended, or took another user's rights
        signal.pidfd_send_signal(handle, number)


def wait_ended(handles: Iterable[int], until: float) -> None:
    """Wait until all have ended, or until the time `until` (monotonic seconds)."""
    poll = select.poll()
    running = set(handles)
    for handle in running:
        poll.register(handle, select.POLLIN)
    while running and (remaining := until - time.monotonic()) > 0:
        for handle, _ in poll.poll(remaining * 1000):
            poll.unregister(handle)
            running.discard(handle)


CHUNK = 1 << 16


class Child:
    """A started command: standard input from the file `stdin`, stdout and stderr into one pipe, its own session.

    Linux kills it when the thread of this event loop ends. Raises OSError or ValueError when it cannot be
    started; a command that does not exist exits with 127, with a message in its output.
    """

    def __init__(
        self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: Path, limits: CommandLimits
    ) -> None:
        self._limits, self._loop = limits, asyncio.get_running_loop()
        self._end: asyncio.Future[AgentStatus | None] = self._loop.create_future()
        self._tail, self.written = bytearray(), 0
        self._pipe, write_end = os.pipe()
        try:
            with stdin.open("rb") as input_file:
                self._process = start(argv, limits, cwd=cwd, env=env, stdin=input_file, out=write_end)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(write_end)
        self.pid = self._process.pid
        os.set_blocking(self._pipe, False)
        self._handle = self._open_handle()
        self._loop.add_reader(self._handle, self._ended, None)
        self._loop.add_reader(self._pipe, self._read)

    def _open_handle(self) -> int:
        try:
            return os.pidfd_open(self.pid)
        except OSError:  # no descriptor is free, so its end could not be noticed
            self._process.kill()
            self._process.wait()
            os.close(self._pipe)
            raise

    async def end(self, own_time: OwnTime, wall_s: float | None) -> AgentStatus | None:
        """Wait for its own end (None), the limit of its output or that of its time, whichever is first."""
        await own_time.wait(self._end, wall_s)
        return self._end.result() if self._end.done() else AgentStatus.TIMED_OUT

    def close(self) -> int | None:
        """Read the rest of the pipe and wait for the process; its exit code, None if it cannot be killed."""
        while self._read():
            pass
        for handle in (self._handle, self._pipe):
            self._loop.remove_reader(handle)
            os.close(handle)
        return self._process.poll()

    @property
    def flooded(self) -> bool:
        return self.written > self._limits.output_bytes

    @property
    def tail(self) -> str:
        """The last bytes as text; bytes that are not UTF-8, such as half a character, are replaced."""
        keep = self._limits.tail_bytes
        return self._tail[-keep:].decode(errors="replace") if keep else ""

    def _ended(self, status: AgentStatus | None) -> None:
        for handle in (self._handle, self._pipe) if status else (self._handle,):
            self._loop.remove_reader(handle)
        if not self._end.done():
            self._end.set_result(status)

    def _read(self) -> bool:
        """Read one piece from the pipe; False when it has none at the moment, or no more may be read."""
        if self.flooded:
            return False
        try:
            piece = os.read(self._pipe, CHUNK)
        except BlockingIOError:
            return False
        if not piece:
            self._loop.remove_reader(self._pipe)
            return False
        self.written += len(piece)
        self._tail += piece
        if len(self._tail) > 2 * self._limits.tail_bytes:
            del self._tail[: len(self._tail) - self._limits.tail_bytes]
        if self.flooded:
            self._ended(AgentStatus.OUTPUT_LIMIT)
        return True


def start(
    argv: Sequence[str], limits: CommandLimits, *, cwd: Path, env: Mapping[str, str], stdin: IO[bytes], out: int
) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-I", "-S", "-X", "utf8", launch.__file__, str(os.getpid()), *limits.resources()]
    command = [*launcher, "--", *argv]
    return subprocess.Popen(
        command, cwd=cwd, env=dict(env), stdin=stdin, stdout=out, stderr=out, start_new_session=True
    )
