"""Run a training command and show of its output what a person wants to see; the rest goes to a file.

`python progress.py LOG COMMAND [ARG ...]` exits as the command does. A signal reaches the command,
which cleans up after itself; when nobody reads what is shown any more, the command is interrupted.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STAGES = (
    ("Started a local Ray instance", "Ray is up"),
    ("train and validate dataloader initialized", "data is loaded"),
    ("actor and ref model engine initialized", "Megatron has built the model"),
    ("LLMServerManager:", "vLLM is serving"),
    ("ready to fit", "ready to train"),
)
CURVE = "validation curve"  # begins what the run prints at its end
STEP = re.compile(r"step:(\d+) - ")
FIGURES = (
    ("reward", r"critic/score/mean:([-\d.e]+)"),
    ("validation", r"val-[a-z]+/[^ ]*/reward/mean@\d+:(?:np\.float64\()?([-\d.e]+)"),
    ("tokens/s", r"perf/throughput:(?:np\.float64\()?([-\d.e]+)"),
    ("seconds", r"timing_s/step:([-\d.e]+)"),
)
STOPPED = (130, 143, 129)  # by Ctrl-C, and by SIGTERM or SIGHUP
PREFIX = re.compile(r"^(?:\x1b\[\d+m)?\([^)]*pid=\d+\)(?:\x1b\[0m)?\s?")


def digest(line: str) -> str | None:
    """The line's content for a person, None when it has none."""
    for text, meaning in STAGES:
        if text in line:
            return meaning
    step = STEP.search(line)
    if step is None:
        return None
    found = ((name, re.search(pattern, line)) for name, pattern in FIGURES)
    return f"step {step[1]:>4}  " + "  ".join(f"{name} {float(m[1]):.3f}" for name, m in found if m)


class Screen:
    """Shows each thing once, until its reader goes away, of which `left` is told."""

    def __init__(self, left: Callable[[], object]) -> None:
        self.begun, self.left = time.monotonic(), left
        self.shown: set[str] = set()
        self.curve = False

    def line(self, line: str) -> None:
        """Show what a line of the command says to a person."""
        text = digest(line)
        if text and text not in self.shown:
            self.shown.add(text)
            self.write(f"{time.monotonic() - self.begun:6.1f} s  {text}\n")
        self.curve = self.curve or line.startswith(CURVE)
        if self.curve and not PREFIX.match(line):
            self.write(line)

    def write(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:  # its pipe or its terminal is closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or each later write fails again
            self.left()


def heeded() -> list[signal.Signals]:
    """A background job of a script inherits that Ctrl-C is ignored, and is stopped by it all the same; one that nohup
    started goes on when its terminal is closed."""
    return [one for one in FORWARDED if one != signal.SIGHUP or signal.getsignal(one) is not signal.SIG_IGN]


def logged(child: subprocess.Popen[str], log: str) -> Iterator[str]:
    """What it writes, line by line, as it goes to the log."""
    assert child.stdout is not None
    with open(log, "w", encoding="utf-8") as file:
        for line in child.stdout:
            file.write(line)
            file.flush()
            yield line


def main(log: str, command: Sequence[str]) -> int:
    told, mine = list[int](), heeded()

    def forward(number: int, _: object = None) -> None:
        told.append(number)
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(child.pid, number)  # to what a script has called too: bash alone goes on after a Ctrl-C

    for number in mine:  # what is ignored here the command would ignore, and what is caught it does not catch
        signal.signal(number, forward)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, mine)  # until there is somebody to forward them to
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes to us alone, and reaches the command once
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
    )
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    interrupt = partial(forward, signal.SIGINT)
    screen, tail = Screen(lambda: told or interrupt()), deque[str](maxlen=40)  # a second signal would kill it
    with child:  # waits for it, whatever happens here
        try:
            for line in logged(child, log):
                tail.append(line)
                screen.line(line)
        except BaseException:
            told or interrupt()
            deque(child.stdout or (), maxlen=0)  # or it would stumble over what it writes at its end
            raise
    code = child.returncode
    code = code if code >= 0 else 128 - code  # as a shell counts death by a signal
    if code in STOPPED:
        screen.write(f"\nIt was stopped; all it wrote is in {log}.\n")
    elif code:
        screen.write(f"\nIt ended with code {code}. The last lines of {log}:\n{''.join(tail)}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
