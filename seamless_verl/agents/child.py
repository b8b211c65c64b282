"""The first process of a command, and what all its processes write.

Invariants: `written` counts the bytes read, `tail` is the last `tail_bytes` of them; nothing is read beyond the
limit; the process is waited for in `close` only, so that its id stays its own while the others are ended.
An asyncio subprocess is not used: it waits for it at once, and for the pipe's end, which a daemon can hold open.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from seamless_verl.agents import launch
from seamless_verl.agents.limits import Limits
from seamless_verl.agents.outcome import AgentStatus

CHUNK = 1 << 16


class Child:
    """A command, started: standard input from the file `stdin`, stdout and stderr into one pipe, a session of its own.

    Linux kills it when the thread that runs this event loop ends. Raises OSError or ValueError when it cannot
    be started; a command that is not there exits with 127, and says so in its output.
    """

    def __init__(self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], stdin: Path, limits: Limits) -> None:
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
    argv: Sequence[str], limits: Limits, *, cwd: Path, env: Mapping[str, str], stdin: IO[bytes], out: int
) -> subprocess.Popen[bytes]:
    launcher = [sys.executable, "-I", "-S", "-X", "utf8", launch.__file__, str(os.getpid()), *limits.resources()]
    command = [*launcher, "--", *argv]
    return subprocess.Popen(
        command, cwd=cwd, env=dict(env), stdin=stdin, stdout=out, stderr=out, start_new_session=True
    )
