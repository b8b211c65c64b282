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
    arguments = [str(folder.absolute()), f"--host={host}", f"--port={port}", f"--ends-with={os.getpid()}"]
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "seamless_verl.tools.view", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C in a terminal is for the run, which then ends it
        )
    except OSError as error:
        logger.warning("The view does not start, and the run goes on without: %s", error)
        yield
        return
    ending = threading.Event()
    reader = threading.Thread(target=follow, args=(process, ending), name="view", daemon=True)
    reader.start()
    try:
        yield
    finally:
        ending.set()
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join(END_S)


def follow(process: subprocess.Popen[str], ending: threading.Event) -> None:
    """Prints the address, and logs what the process said last if it ends before the run does."""
    assert process.stdout is not None
    lines: deque[str] = deque(maxlen=LAST_LINES)
    with process.stdout:
        for line in process.stdout:
            if line.startswith("http"):
                sys.stderr.write(f"The view of this run: {line.strip()}\n")  # a log file is for others too
            else:
                lines.append(line.strip())
    if not ending.is_set():
        logger.warning("The view has ended, and the run goes on without: %s", " ".join(lines) or process.wait())
