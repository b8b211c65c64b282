"""Does a long run grow? `python -m seamless_verl.tools.bench.soak [RECIPE|CONFIG.yaml] [--minutes 60] [KEY=VALUE ...]`.

It trains without an end, looks at the run's processes and files every few seconds, stops the run as Ctrl-C does, and
says of each series whether it is flat: private memory, descriptors and threads by kind of process, shared memory, and
what the journal, the checkpoints and temporary files take of the disk. The first part of the time is warm-up.

Beside the table in the terminal: `soak.html` with plots, and `samples.jsonl`. Exit code 1 if something grows, 2 for
an argument that cannot work, 3 if the run failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from seamless_verl.config.words import quoted
from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tools.bench.arguments import job_parser, new_folder
from seamless_verl.tools.bench.soak.report import BLOCKS, Verdict, growths, measured, page, summary, table
from seamless_verl.tools.bench.soak.samples import SCRATCH, Sample, look
from seamless_verl.tools.compare.command import split_job
from seamless_verl.tools.compare.job import Job, job_named
from seamless_verl.tools.compare.running import (
    LOG_END,
    LOG_FILE,
    METRICS_FILE,
    RunFailedError,
    Tail,
    exit_on_signals,
    managed_process,
    stop,
)

ENDLESS = 1_000_000
RUN_FAILED = 3
FIRST_STEP_S = 900.0  # a recipe makes its model and its data first
SAMPLES_FILE, PAGE_FILE = "samples.jsonl", "soak.html"
CHECKPOINTS = "checkpoints"


def overrides_of(folder: Path) -> list[str]:
    """What makes a run endless, with checkpoints that are replaced; the user's own overrides come before these."""
    return [
        *(f"trainer.total_training_steps={ENDLESS}", f"trainer.total_epochs={ENDLESS}"),
        *("trainer.resume_mode=disable", "trainer.logger=[console,file]"),
        f"trainer.default_local_dir={quoted(str(folder / CHECKPOINTS))}",
        f"hydra.run.dir={quoted(str(folder / 'hydra'))}",
    ]


DEFAULTS = ("trainer.save_freq=10", "trainer.max_actor_ckpt_to_keep=2", "trainer.test_freq=-1")
"""Unless the user sets them."""


def soak(
    job: Job, out: Path, seconds: float, every_s: float, say: Callable[[str], object] = lambda text: None
) -> list[Sample]:
    """Runs the job for so long after its first step; returns what was seen, and writes it to `samples.jsonl`.

    Raises:
        RunFailedError: the run ended by itself, made no step, did not stop as it should, or left a process.
    """
    folder = out / "run"
    folder.mkdir(parents=True)
    with scratch() as temporary, (folder / LOG_FILE).open("wb") as log, (out / SAMPLES_FILE).open("w") as file:
        command = job.command(overrides_of(folder))
        env = job.environment(folder) | {"TMPDIR": str(temporary)}
        with managed_process(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True) as process:
            samples = []
            for sample in _watch(process, folder, temporary, seconds, every_s):
                samples.append(sample)
                file.write(json.dumps(as_row(sample)) + "\n")
                file.flush()
                say(f"{sample.at / 60:.1f} min, {sample.steps} steps")
            others = psutil.Process(process.pid).children(recursive=True)
            stop(process)
        left = [one for one in others if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if process.returncode not in (0, 130) or left:
            raise RunFailedError(f"it ended with code {process.returncode} and left {left}\n{log_end(folder)}")
    return samples


def _watch(
    process: subprocess.Popen[bytes], folder: Path, temporary: Path, seconds: float, every_s: float
) -> Iterator[Sample]:
    """A look every so many seconds, from the first step on, for so long."""
    metrics, steps = Tail(folder / METRICS_FILE), 0
    began = time.monotonic()
    due, end = began, began + FIRST_STEP_S
    watched, folders = psutil.Process(process.pid), {CHECKPOINTS: folder / CHECKPOINTS, SCRATCH: temporary}
    while (now := time.monotonic()) < end:
        new = len(metrics.read())
        if new and not steps:
            end = now + seconds
        steps += new
        if process.poll() is not None:
            raise RunFailedError(f"it ended after {steps} steps with code {process.returncode}\n{log_end(folder)}")
        if steps:
            yield Sample(now - began, steps, look(watched, folders))
        due = max(due + every_s, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))  # until the next look: looks are at equal times
    if not steps:
        raise RunFailedError(f"it made no step in {FIRST_STEP_S:.0f} s\n{log_end(folder)}")


def log_end(folder: Path) -> str:
    return (folder / LOG_FILE).read_text(errors="replace")[-LOG_END:]


@contextmanager
def scratch() -> Iterator[Path]:
    """The run's TMPDIR; a short path, since sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # Ray's own files may go while they are removed


def as_row(sample: Sample) -> dict[str, Any]:
    values = {f"{what}: {whom}": value for (what, whom), value in sorted(sample.values.items())}
    return {"at": round(sample.at, 2), "steps": sample.steps, **values}


def given(overrides: Sequence[str]) -> list[str]:
    """The user's overrides, after those of our defaults that they do not set."""
    keys = {override.split("=")[0].lstrip("+") for override in overrides}
    return [*(one for one in DEFAULTS if one.split("=")[0] not in keys), *overrides]


@exits_on_config_error
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if a series grows, 3 if the run failed, or 2 with one line for an argument that cannot work."""
    options = _parser().parse_intermixed_args(argv)
    seconds = 60.0 * options.minutes
    check_times(seconds, options.every, options.warm_up)
    out = new_folder(options.out)
    target, overrides = split_job(options.target)
    job = job_named(target, given(overrides), out)
    try:
        samples = soak(job, out, seconds, options.every, lambda text: sys.stderr.write(f"{text}\n"))
    except RunFailedError as error:
        sys.stderr.write(f"{error}\n")
        return RUN_FAILED
    kept = measured(samples, options.warm_up)
    if len(kept) < 2 * BLOCKS:
        sys.stderr.write(f"{len(kept)} looks are too few for a slope: the machine is slow. Give more --minutes\n")
        return RUN_FAILED
    found = growths(kept)
    text = summary(kept, found)
    sys.stdout.write(f"{table(found)}\n{text}\n")
    (out / PAGE_FILE).write_text(page(f"Soak: {job.name}", text, samples, kept[0].at))
    sys.stderr.write(f"{out / PAGE_FILE}\n")
    return int(any(one.verdict is Verdict.GROWS for one in found.values()))


def check_times(seconds: float, every_s: float, warm_up: float) -> None:
    """ConfigError where no slope could be had."""
    if not 0 <= warm_up < 1:
        raise ConfigError("--warm-up", warm_up, "is no part of the time", "Give 0 to below 1")
    if not every_s > 0:
        raise ConfigError("--every", every_s, "is no time between two looks", "Give seconds above 0")
    if not seconds * (1 - warm_up) / every_s >= 4 * BLOCKS:
        way_out = f"Give more minutes, or a smaller --every: {4 * BLOCKS} looks after the warm-up at least"
        raise ConfigError("--minutes", seconds / 60, "is too short for a slope", way_out)


def _parser() -> argparse.ArgumentParser:
    parser = job_parser("soak", __doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("soak"), help="a new folder")
    parser.add_argument("--minutes", type=float, default=60.0, help="from the first step on")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from a look at the run to the next")
    parser.add_argument("--warm-up", type=float, default=0.25, help="the part of the time that is left out")
    return parser


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
