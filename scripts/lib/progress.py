"""Run a training command and show of its output what a person wants to see; the rest goes to a file.

`python progress.py LOG COMMAND [ARG ...]` exits as the command does. A signal reaches the command,
which cleans up after itself.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress

FORWARDED = (signal.SIGINT, signal.SIGTERM)
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


def main(log: str, command: list[str]) -> int:
    start, shown, tail, curve = time.monotonic(), set(), deque(maxlen=40), False
    for number in FORWARDED:  # a background job of a script inherits that Ctrl-C is ignored, and so would the command
        signal.signal(number, signal.SIG_DFL)
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C comes to us alone, and reaches the command once
    )

    def forward(number: int, _: object) -> None:
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(child.pid, number)  # to what a script has called too: bash alone goes on after a Ctrl-C

    for number in FORWARDED:
        signal.signal(number, forward)
    assert child.stdout is not None
    with open(log, "w", encoding="utf-8") as file:
        for line in child.stdout:
            file.write(line)
            file.flush()
            tail.append(line)
            text = digest(line)
            if text and text not in shown:
                shown.add(text)
                sys.stdout.write(f"{time.monotonic() - start:6.1f} s  {text}\n")
                sys.stdout.flush()
            curve = curve or line.startswith(CURVE)
            if curve and not PREFIX.match(line):
                sys.stdout.write(line)
    code = child.wait()
    code = code if code >= 0 else 128 - code  # as a shell counts death by a signal
    if code not in (0, 130, 143):
        sys.stdout.write(f"\nIt ended with code {code}. The last lines of {log}:\n{''.join(tail)}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
