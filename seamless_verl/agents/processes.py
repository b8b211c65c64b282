"""Find and end every process of one command, also those that left its process group. Linux.

A process is one of the command's when it is in the session its first process opened, or carries its mark in
the environment it was started with, or descends from one that is. A daemon that forks twice, opens a session
of its own and is adopted by init still has the mark; only one that also clears its environment escapes.

Invariants: the first process has not been waited for, so its id, its group's and its session's cannot be given
to another; a signal goes through a descriptor whose process was recognized after it was opened. So nothing
foreign is ever signalled. This module blocks: it waits on descriptors, never for a fixed time.

The first process of a command, and what all its processes write.

Invariants: `written` counts the bytes read, `tail` is the last `tail_bytes` of them; nothing is read beyond the
limit; the process is waited for in `close` only, so that its id stays its own while the others are ended.
An asyncio subprocess is not used: it waits for it at once, and for the pipe's end, which a daemon can hold open.
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


CHUNK = 1 << 16


class Child:
    """A command, started: standard input from the file `stdin`, stdout and stderr into one pipe, a session of its own.

    Linux kills it when the thread that runs this event loop ends. Raises OSError or ValueError when it cannot
    be started; a command that is not there exits with 127, and says so in its output.
    """

    def __init__(
        self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: Path, limits: CommandLimits
    ) -> None:
        self._limits, self._loop = limits, asyncio.get_running_loop()
        self._end: asyncio.Future[AgentStatus | None] = self._loop.create_future()
        self._tail, self.written = bytearray(), 0
        self._pipe, theirs = os.pipe()
        try:
            with stdin.open("rb") as given:
                self._process = start(argv, limits, cwd=cwd, env=env, stdin=given, out=theirs)
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)
        self.pid = self._process.pid
        os.set_blocking(self._pipe, False)
        self._handle = self._open_handle()
        self._loop.add_reader(self._handle, self._ended, None)
        self._loop.add_reader(self._pipe, self._read)

    def _open_handle(self) -> int:
        try:
            return os.pidfd_open(self.pid)
        except OSError:  # no descriptor left: nobody would see its end
            self._process.kill()
            self._process.wait()
            os.close(self._pipe)
            raise

    async def end(self, wall_s: float | None) -> AgentStatus | None:
        """Wait for whichever comes first: its own end (None), its output's limit, its time's limit."""
        await asyncio.wait({self._end}, timeout=wall_s)
        return self._end.result() if self._end.done() else AgentStatus.TIMED_OUT

    def close(self) -> int | None:
        """Read what is left in the pipe, wait for the process; its exit code, None if it cannot be killed."""
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
        """The last bytes as text; what is no UTF-8, such as a character cut in two, is replaced."""
        keep = self._limits.tail_bytes
        return self._tail[-keep:].decode(errors="replace") if keep else ""

    def _ended(self, status: AgentStatus | None) -> None:
        for handle in (self._handle, self._pipe) if status else (self._handle,):
            self._loop.remove_reader(handle)
        if not self._end.done():
            self._end.set_result(status)

    def _read(self) -> bool:
        """Take one piece from the pipe; False when there is none for now, or none may be taken any more."""
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
