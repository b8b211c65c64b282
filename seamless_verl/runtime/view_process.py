"""The view beside a run: a process of its own, started and ended with the run. Whatever becomes of it, the run goes on.

Invariant: when the block ends, the process has ended. It also ends by itself when the run's process is killed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)
LAST_LINES = 5  # of its output, in the log when it ends by itself
END_S = 5.0  # from asking it to end until it is killed


@contextmanager
def viewing(folder: Path, host: str, port: int) -> Iterator[None]:
    """In the block, the run in `folder` is shown at an address that is printed to stderr; if not, the log says why."""
    process = ViewProcess(folder, host, port)
    try:
        yield
    finally:
        process.end()


class ViewProcess:
    """The process, and a thread that reads its output."""

    def __init__(self, folder: Path, host: str, port: int) -> None:
        self._ending = False
        self._process: subprocess.Popen[str] | None = None
        arguments = [str(folder.absolute()), f"--host={host}", f"--port={port}", f"--ends-with={os.getpid()}"]
        command = [sys.executable, "-m", "seamless_verl.tools.view", *arguments]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # Ctrl-C in a terminal is for the run, which then ends it
            )
        except OSError as error:
            logger.warning("The view does not start, and the run goes on without: %s", error)
            return
        self._reader = threading.Thread(target=self._read, args=(self._process,), name="view", daemon=True)
        self._reader.start()

    def end(self) -> None:
        """Ends the process; a second call does nothing."""
        self._ending = True
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(END_S)

    def _read(self, process: subprocess.Popen[str]) -> None:
        """Prints the address, and logs what the process said last if it ends before the run does."""
        assert process.stdout is not None
        lines: deque[str] = deque(maxlen=LAST_LINES)
        with process.stdout:
            for line in process.stdout:
                if line.startswith("http"):
                    sys.stderr.write(f"The view of this run: {line.strip()}\n")  # a log file is for others too
                else:
                    lines.append(line.strip())
        if not self._ending:
            logger.warning("The view has ended, and the run goes on without: %s", " ".join(lines) or process.wait())
