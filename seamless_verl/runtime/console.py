"""The console of a run: lines that come there whatever becomes of Ray's log monitor.

Ray shows what workers print by a process that reads their logs, and by messages of its GCS. Neither comes back when the
process dies, when the GCS is started again, or when a worker prints more in one line than a message takes. So lines
that a user follows a run by come through a pipe beside the run file, which the command itself reads.

`say` is for what a command writes when it ends: a console that is closed or full keeps it from nothing.

The last screen of a run that ended early says why, the way out, and how the same command goes on. What fails first
makes others fail, whose messages come later and are longer. So the process that knows the cause keeps it in a file
beside the run file. The first one stays, and the supervisor writes it when all other processes are gone.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from select import PIPE_BUF
from tempfile import NamedTemporaryFile
from typing import IO, TextIO

from seamless_verl.errors import SeamlessError, shorten
from seamless_verl.runtime.checkpoint_marker import step_folder, tracker_state

RUN_FILE = "SEAMLESS_RUN_FILE"  # names the file in which a run registers with its supervisor
PIPE = "console"  # beside the run file
LAST_LINES_S = 5.0  # for a console that takes nothing more
ENDED_EARLY = "The run ended early: "
CAUSE, RESUME = "cause.txt", "resume.json"  # beside the run file
LINES, CHARS = 12, 1200  # of a cause, at most: 20 lines are what a terminal shows with all that is below it
FRAME = re.compile(r'File "(/.+)", line (\d+), in (\S+)')
UNKNOWN = "no process of it has said why. Its last messages are above"
KILLED = "by somebody, or by the kernel when memory was short, which `dmesg` shows"
WAYS_OUT = {
    errno.ENOSPC: "Free the disk, or name a folder on another one",
    errno.EDQUOT: "Free some of your quota, or name another folder",
    errno.EROFS: "Make the file system writable, or name another folder",
    errno.EACCES: "Make it accessible, or name another folder",
    errno.EPERM: "Make it writable, or name another folder",
}


def say(line: str) -> None:
    """Write a line to standard error."""
    _write(sys.stderr, f"{line}\n")


def show_line(line: str) -> None:
    """Write a line to the console of the run that this process belongs to; it may be an actor of the run.

    A console that takes no more, since nobody reads it, loses the line.
    """
    try:
        pipe = os.open(pipe_of_run(), os.O_WRONLY | os.O_NONBLOCK)
    except (OSError, LookupError):  # there is none: the command is on another machine, or has ended
        _write(sys.stdout, f"{line}\n")
        return
    with suppress(OSError), os.fdopen(pipe, "wb", buffering=0) as file:
        file.write(line.encode()[: PIPE_BUF - 1] + b"\n")  # whole, or not at all


@contextmanager
def lines_shown() -> Iterator[None]:
    """In the block, this process writes what `show_line` is given to its standard output."""
    try:
        os.mkfifo(path := pipe_of_run())
    except (OSError, LookupError):  # a file system without pipes, or a command without a supervisor
        yield
        return
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # it would wait for a writer
    writer = os.open(path, os.O_WRONLY)  # while there is one, the pipe has no end
    os.set_blocking(reader, True)
    thread = threading.Thread(target=_show, args=(os.fdopen(reader, errors="replace"),), name="console", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(writer)
        thread.join(LAST_LINES_S)


def _show(lines: IO[str]) -> None:
    with lines:
        for line in lines:
            _write(sys.stdout, line)


def pipe_of_run() -> Path:
    """Raises KeyError in a process without a run file."""
    return Path(os.environ[RUN_FILE]).with_name(PIPE)


def _write(stream: TextIO | None, text: str) -> None:
    with suppress(OSError, ValueError):  # it is closed, or its disk is full
        if stream is not None:  # its descriptor was closed when python started
            stream.write(text)
            stream.flush()


def keep_cause(cause: BaseException | str, run_file: Path | None = None) -> None:
    """Keep why the run ends, unless an earlier cause is kept; `run_file` is that of this process by default.

    Nothing is kept without a supervisor, or where the disk of its folder takes nothing: then the screen lacks it.
    """
    run_file = run_file or Path(os.environ.get(RUN_FILE, ""))
    if not run_file.is_absolute():
        return
    text = cause if isinstance(cause, str) else describe(cause)
    with suppress(OSError), NamedTemporaryFile("w", dir=run_file.parent, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.link(file.name, run_file.with_name(CAUSE))  # fails if there is one


def describe(error: BaseException) -> str:
    """The error's own cause, which it may carry through several of Ray's actors, and where it was raised.

    Errors of this package are complete, and say a way out.
    """
    frame = FRAME.findall("".join(traceback.format_tb(error.__traceback__)))[-1:]
    while isinstance(cause := getattr(error, "cause", None), BaseException):  # Ray's error of a call
        frame = FRAME.findall(str(error))[-1:] or frame
        error = cause
    if isinstance(error, SeamlessError):
        return str(error)
    message = shorten(error, CHARS)
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, OSError) and error.errno in WAYS_OUT:
        return f"{text}. {WAYS_OUT[error.errno]}"
    return "\n".join([text, *(f"It was raised in {file}, line {line}, in {name}" for file, line, name in frame)])


def stopped_by(number: int) -> str:
    return f"it was stopped by {signal.Signals(number).name}"


def driver_killed(number: int) -> str:
    killer = f", {KILLED}" if number == signal.SIGKILL else ""
    return f"its driver, the child of the command's process, was ended by {signal.Signals(number).name}{killer}"


def last_screen(run_file: Path) -> list[str]:
    """The lines for a run that ended early, by what its processes kept beside its run file."""
    try:
        cause = run_file.with_name(CAUSE).read_text(encoding="utf-8")
    except OSError:
        cause = UNKNOWN
    lines = cause.splitlines()
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], "..."]
    return [ENDED_EARLY + lines[0], *lines[1:], *how_to_go_on(run_file)]


def how_to_go_on(run_file: Path) -> list[str]:
    """One line, none where the run ended before it had registered, or writes on machines that are not seen here."""
    try:
        settings = ResumeSettings.of_run(run_file)
        return [] if settings is None else [settings.hint()]
    except OSError as error:
        return [f"The same command resumes from the last complete checkpoint. Which one it is cannot be read: {error}"]


@dataclass(frozen=True)
class ResumeSettings:
    """`trainer.default_local_dir`, `resume_mode`, `resume_from_path` and `save_freq` of a run."""

    checkpoints: str
    mode: str
    path: str | None
    save_freq: int

    def keep(self, run_file: Path) -> None:
        run_file.with_name(RESUME).write_text(json.dumps(asdict(self)))

    @classmethod
    def of_run(cls, run_file: Path) -> ResumeSettings | None:
        """What the run kept; None when it ended before."""
        file = run_file.with_name(RESUME)
        return cls(**json.loads(file.read_text())) if file.is_file() else None

    def hint(self) -> str:
        """One line for the user, by the last complete checkpoint that is there now."""
        if self.mode == "resume_path":
            return f"The same command begins again from trainer.resume_from_path={self.path}"
        folder = Path(self.checkpoints)
        state = tracker_state(folder)
        step = int(state[0]) if state is not None and str(state[0]).isdigit() else None
        if step is None:
            more = "" if self.save_freq > 0 else "; with trainer.save_freq=N it saves every N steps, and resumes"
            return f"There is no checkpoint in {folder}: the same command begins anew{more}"
        if self.mode != "auto":
            return (
                f"trainer.resume_mode={self.mode}: the same command begins anew. With trainer.resume_mode=auto it "
                f"resumes from step {step}, in {step_folder(folder, step)}"
            )
        return f"The same command resumes from step {step}, whose checkpoint is {step_folder(folder, step)}"
