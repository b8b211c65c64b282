"""Run a training command, print a summary of its progress, and write its whole output to a file.

`python progress.py LOG COMMAND [ARG ...]` exits as the command does. A command that was refused, with code 2, leaves an
earlier one's log as it was. Signals are forwarded to the command, which cleans up after itself. When the summary cannot
be written any more (a closed pipe or terminal), the command is interrupted.
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
CURVE = "validation curve"  # the first words of what the run prints at its end
LINE = re.compile(r"step:\d+ of .+")  # the seamless trainer's one line a step, which is a summary already
STEP = re.compile(r"step:(\d+) - ")  # verl's
VIEW = re.compile(r"The view of this run: http\S+")  # whoever has the address sees the run
LEFT = re.compile(r"(?:device time|checkpoint): /.+")  # the files that a run names at its end
FIGURES = (
    ("reward", r"critic/score/mean:([-\d.e]+)"),
    ("validation", r"val-[a-z]+/[^ ]*/reward/mean@\d+:(?:np\.float64\()?([-\d.e]+)"),
    ("tokens/s a device with prompts", r"perf/throughput:(?:np\.float64\()?([-\d.e]+)"),
    ("seconds", r"timing_s/step:([-\d.e]+)"),
)
STOPPED = (130, 143, 129)  # by Ctrl-C, and by SIGTERM or SIGHUP
REFUSED = 2
WARNING = re.compile(r"\[seamless_verl\.main_ppo\]\[WARNING\] - (.+)")  # as hydra writes what the checks found
PREFIX = re.compile(r"^(?:\x1b\[\d+m)?\([^)]*pid=\d+\)(?:\x1b\[0m)?\s?")


def summarize(line: str) -> str | None:
    """The line's content for the summary, None when it has none."""
    for text, meaning in STAGES:
        if text in line:
            return meaning
    if (warning := WARNING.search(line)) is not None:
        return f"warning: {warning[1]}"
    if (own := LINE.search(line) or VIEW.search(line) or LEFT.match(PREFIX.sub("", line))) is not None:
        return own[0]
    step = STEP.search(line)
    if step is None:
        return None
    found = ((name, re.search(pattern, line)) for name, pattern in FIGURES)
    return f"step {step[1]:>4}  " + "  ".join(f"{name} {float(m[1]):.3f}" for name, m in found if m)


class Screen:
    """Prints each line of the summary once; calls `on_closed` when standard output is closed."""

    def __init__(self, on_closed: Callable[[], object]) -> None:
        self.begun, self.on_closed = time.monotonic(), on_closed
        self.shown: set[str] = set()
        self.curve = False

    def show(self, line: str) -> None:
        """Print the summary of a line of the command, if it has one."""
        text = summarize(line)
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
            self.on_closed()


def signals_to_forward() -> list[signal.Signals]:
    """All of FORWARDED, but SIGHUP where it is ignored: what nohup started survives when its terminal is closed.

    A background job of a script inherits that SIGINT is ignored, and is stopped by it all the same.
    """
    return [number for number in FORWARDED if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def log_lines(child: subprocess.Popen[str], log: str) -> Iterator[str]:
    """The lines that the child writes, each after it was written to the log, where the view's address is left out."""
    assert child.stdout is not None
    with open(log, "w", encoding="utf-8") as file:
        for line in child.stdout:
            file.write(VIEW.sub("The view of this run: its address is on the screen", line))
            file.flush()
            yield line


def main(log: str, command: Sequence[str]) -> int:
    """Run the command as `follow` does; the log that was there stays if it is refused."""
    earlier, code = f"{log}.earlier", None
    with suppress(FileNotFoundError):
        os.replace(log, earlier)
    try:
        code = follow(log, command)
    finally:
        with suppress(FileNotFoundError):
            os.replace(earlier, log) if code == REFUSED else os.unlink(earlier)
    return code


def follow(log: str, command: Sequence[str]) -> int:
    """Run the command, with its summary on the screen and its output in the log; its exit code."""
    forwarded, numbers = list[int](), signals_to_forward()

    def forward(number: int, _: object = None) -> None:
        forwarded.append(number)
        with suppress(ProcessLookupError):  # the child has just ended
            os.killpg(child.pid, number)  # also to what a script has called: bash alone ignores a Ctrl-C

    for number in numbers:  # the command inherits an ignored signal as ignored, and a handled one as default
        signal.signal(number, forward)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # until there is a child to forward them to
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a Ctrl-C reaches the command once: by us
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
    )
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    interrupt = partial(forward, signal.SIGINT)
    screen, tail = Screen(lambda: forwarded or interrupt()), deque[str](maxlen=40)  # a second signal would kill it
    with child:  # waits for the child in any case
        try:
            for line in log_lines(child, log):
                tail.append(line)
                screen.show(line)
        except BaseException:
            forwarded or interrupt()
            deque(child.stdout or (), maxlen=0)  # or the child would fail when it writes at its end
            raise
    code = child.returncode
    code = code if code >= 0 else 128 - code  # as a shell counts death by a signal
    if code in STOPPED:
        screen.write(f"\nIt was stopped; all it wrote is in {log}.\n")
        if command := os.environ.get("GOES_ON_WITH"):
            screen.write(f"From its last checkpoint, if it has one, it goes on with: {command}\n")
    elif code == REFUSED:
        screen.write(f"\nIt was refused:\n{''.join(tail)}")
    elif code:
        screen.write(f"\nIt ended with code {code}. The last lines of {log}:\n{''.join(tail)}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
