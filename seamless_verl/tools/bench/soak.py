"""Does a long run grow? `python -m seamless_verl.tools.bench.soak [RECIPE|CONFIG.yaml] [--minutes 60] [KEY=VALUE ...]`.

It trains without an end, looks at the run's processes and files every few seconds, stops the run as Ctrl-C does, and
says of each series whether it is flat: private memory, descriptors and threads by kind of process, shared memory, and
what the journal, the checkpoints and temporary files take of the disk. The first part of the time is warm-up.

Beside the table in the terminal: `soak.html` with plots, and `samples.jsonl`. Exit code 1 if something grows, 2 for
an argument that cannot work, 3 if the run failed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

from seamless_verl.config.words import quoted
from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.tools.bench.growth import BLOCKS, Sample, Verdict, growths, measured, page, summary, table
from seamless_verl.tools.bench.shared import RUN_FAILED, job_parser, new_folder
from seamless_verl.tools.compare.command import split_job
from seamless_verl.tools.compare.job import Job, job_named
from seamless_verl.tools.compare.running import (
    LOG_FILE,
    METRICS_FILE,
    RunFailedError,
    Tail,
    exit_on_signals,
    log_end,
    managed_process,
    stop,
)

ENDLESS = 1_000_000
FIRST_STEP_S = 900.0  # a recipe makes its model and its data first
SAMPLES_FILE, PAGE_FILE = "samples.jsonl", "soak.html"
CHECKPOINTS, SCRATCH = "checkpoints", "temporary files"  # Ray's session is among the last, with its logs
JOURNAL = re.compile(r"^trajectories(-\d+)?\.sqlite(-wal)?$")
DEFAULTS = ("trainer.save_freq=10", "trainer.max_actor_ckpt_to_keep=2", "trainer.test_freq=-1")
"""Unless the user sets them."""


def overrides_of(folder: Path) -> list[str]:
    """What makes a run endless, with checkpoints that are replaced; the user's own overrides come before these."""
    return [
        *(f"trainer.total_training_steps={ENDLESS}", f"trainer.total_epochs={ENDLESS}"),
        *("trainer.resume_mode=disable", "trainer.logger=[console,file]"),
        f"trainer.default_local_dir={quoted(str(folder / CHECKPOINTS))}",
        f"hydra.run.dir={quoted(str(folder / 'hydra'))}",
    ]


def with_defaults(overrides: Sequence[str]) -> list[str]:
    """The user's overrides, after those of our defaults that they do not set."""
    keys = {override.split("=")[0].lstrip("+") for override in overrides}
    return [*(one for one in DEFAULTS if one.split("=")[0] not in keys), *overrides]


def soak(job: Job, out: Path, seconds: float, every_s: float, say: Callable[[str], object]) -> list[Sample]:
    """Runs the job for so long after its first step; returns what was seen, and writes it to `samples.jsonl`.

    Raises:
        RunFailedError: the run ended by itself, made no step, did not stop as it should, or left a process.
    """
    folder, samples = out / "run", list[Sample]()
    folder.mkdir(parents=True)
    with (
        # A short path, since sockets lie in it; Ray's own files may go while they are removed.
        tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as temporary,
        (folder / LOG_FILE).open("wb") as log,
        (out / SAMPLES_FILE).open("w") as file,
    ):
        env = job.environment(folder) | {"TMPDIR": temporary}
        with managed_process(job.command(overrides_of(folder)), log, env, group=False) as process:
            for sample in watch(process, folder, Path(temporary), seconds, every_s):
                samples.append(sample)
                values = {f"{what}: {whom}": value for (what, whom), value in sorted(sample.values.items())}
                file.write(json.dumps({"at": round(sample.at, 2), "steps": sample.steps, **values}) + "\n")
                file.flush()
                say(f"{sample.at / 60:.1f} min, {sample.steps} steps\n")
            others = psutil.Process(process.pid).children(recursive=True)
            stop(process)
        left = [one for one in others if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if process.returncode not in (0, 130) or left:
            raise RunFailedError(f"it ended with code {process.returncode} and left {left}\n{log_end(folder)}")
    return samples


def watch(
    process: subprocess.Popen[bytes], folder: Path, temporary: Path, seconds: float, every_s: float
) -> Iterator[Sample]:
    """A look every so many seconds, from the first step on, for so long."""
    metrics, steps = Tail(folder / METRICS_FILE), 0
    began = due = time.monotonic()
    end = began + FIRST_STEP_S
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


def look(run: psutil.Process, folders: Mapping[str, Path]) -> dict[tuple[str, str], float]:
    """All series of a run's process and its descendants, and of its folders by their names, now."""
    values: defaultdict[tuple[str, str], float] = defaultdict(float)
    for process in [run, *run.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, FileNotFoundError, ProcessLookupError):
            held = {
                "memory": process.memory_full_info().uss,  # what would be free if it ended
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
                "processes": 1,
            }
            role = role_of(process.cmdline())
            for what, value in held.items():  # as a whole, or not at all: one may end while it is looked at
                values[what, role] += float(value)
    values["shared memory", "all"] = float(psutil.disk_usage("/dev/shm").used)
    for name, folder in folders.items():
        for of_whom, size in folder_bytes(name, folder):
            values["disk", of_whom] += size
    return dict(values)


def role_of(command: list[str]) -> str:
    """A process's name in tables: an actor's class as Ray titles it, a script, or the program."""
    if not command:
        return "ended"
    title = command[0].split()[0]
    if title.startswith("ray::"):
        return "ray::" + re.split(r"[.(]", title.removeprefix("ray::"))[0]
    program = os.path.basename(title)
    if not program.startswith("python"):
        return program
    for before, argument in pairwise(command):
        if before == "-m":
            return argument
        if argument.endswith(".py"):
            return "/".join(Path(argument).parts[-2:])
    return "python"


def folder_bytes(name: str, folder: Path) -> Iterator[tuple[str, float]]:
    """(series, bytes) of a folder's files: those of a journal by themselves."""
    for place, _, names in os.walk(folder):
        for file in names:
            with suppress(FileNotFoundError):  # removed since the folder was listed
                size = float(Path(place, file).lstat().st_blocks * 512)
                yield ("journal" if JOURNAL.match(file) else name), size


def check_times(seconds: float, every_s: float, warm_up: float) -> None:
    """ConfigError where no slope could be had."""
    if not 0 <= warm_up < 1:
        raise ConfigError("--warm-up", warm_up, "is no part of the time", "Give 0 to below 1")
    if not every_s > 0:
        raise ConfigError("--every", every_s, "is no time between two looks", "Give seconds above 0")
    if not seconds * (1 - warm_up) / every_s >= 4 * BLOCKS:
        way_out = f"Give more minutes, or a smaller --every: {4 * BLOCKS} looks after the warm-up at least"
        raise ConfigError("--minutes", seconds / 60, "is too short for a slope", way_out)


@exits_on_config_error
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 if a series grows, 3 if the run failed, or 2 with one line for an argument that cannot work."""
    parser = job_parser("soak", __doc__)
    parser.add_argument("--out", type=Path, default=Path("soak"), help="a new folder")
    parser.add_argument("--minutes", type=float, default=60.0, help="from the first step on")
    parser.add_argument("--every", type=float, default=10.0, help="seconds from a look at the run to the next")
    parser.add_argument("--warm-up", type=float, default=0.25, help="the part of the time that is left out")
    options = parser.parse_intermixed_args(argv)
    seconds = 60.0 * options.minutes
    check_times(seconds, options.every, options.warm_up)
    out, (target, overrides) = new_folder(options.out), split_job(options.target)
    job = job_named(target, with_defaults(overrides), out)
    try:
        samples = soak(job, out, seconds, options.every, sys.stderr.write)
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


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
