"""What the live view costs a run: `python -m seamless_verl.tools.bench.view [RECIPE|CONFIG.yaml] [KEY=VALUE ...]`.

Runs of one job in pairs, each second pair in reverse order: one alone, and one with `seamless.view=127.0.0.1:0` and a
client that asks for what the page's overview asks for, as often. Of each run are printed its trained response tokens a
second after step `--skip`, and what the view's process took, as a share of all cores' time. The latter is what the view
can cost at most; the former has the noise of the machine in it.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import psutil

from seamless_verl.cli.output import text_table
from seamless_verl.config.words import quoted
from seamless_verl.errors import ConfigError, exits_on_config_error
from seamless_verl.runtime.step_metrics import response_tokens
from seamless_verl.tools.bench.arguments import job_parser, new_folder
from seamless_verl.tools.compare.command import split_job
from seamless_verl.tools.compare.job import Job, job_named
from seamless_verl.tools.compare.processes import RunFailedError, exit_on_signals
from seamless_verl.tools.compare.running import LOG_FILE, Step, run_logged

ADDRESS = re.compile(r"The view of this run: (http\S+)")
MODULE = "seamless_verl.tools.view"
ASKS = ("api/run", "api/devices?columns=1000&last=600", "api/metrics")  # of `assets/main.js`, `overview.js`, `lanes.js`
LONGEST_S = 3600.0  # of one run
EVERY_S = 4.0  # LIVE_MS of assets/main.js
RUN_FAILED = 3
VIEW = "seamless.view"
HEADER = ("round", "run", "tokens/s", "view's CPU", "replies")


@dataclass
class Viewer:
    """A client of a run's page, in a thread of its own, until the last step: the page ends with the run soon after.

    `pid` is the run's, `cpu_s` of the view's process. `gone` counts looks at which nobody listened.
    """

    log: Path
    last_step: int
    pid: int = 0
    replies: int = 0
    cpu_s: float = 0.0
    gone: int = 0
    refused: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run_began(self, pid: int, _: float) -> None:
        self.pid = pid

    def step_logged(self, step: Step) -> None:
        if step["step"] >= self.last_step:
            self.ended.set()

    def look(self) -> None:
        """Asks until `ended`, from when the run has printed its address."""
        while not self.ended.wait(EVERY_S):
            if (address := self._address()) is not None:
                self._ask(address)
                self._count_cpu()
        self._count_cpu()

    def _address(self) -> str | None:
        found = ADDRESS.search(self.log.read_text(errors="replace")) if self.log.exists() else None
        return None if found is None else found[1]

    def _ask(self, address: str) -> None:
        for path in ASKS:
            try:
                answer = httpx.get(f"{address.rstrip('/')}/{path}", timeout=30)
            except httpx.TransportError:
                self.gone += not self.ended.is_set()  # the run may end while it is asked
                return
            self.replies += answer.status_code == httpx.codes.OK
            if answer.status_code != httpx.codes.OK:
                self.refused.append(f"{path}: {answer.status_code}")

    def _count_cpu(self) -> None:
        with suppress(psutil.NoSuchProcess):  # the run has ended
            for process in psutil.Process(self.pid).children(recursive=True):
                if MODULE in process.cmdline():
                    used = process.cpu_times()
                    self.cpu_s = used.user + used.system


@dataclass(frozen=True)
class ViewRun:
    """One run: trained response tokens a second, and the share of the cores' time that the view's process took."""

    round: int
    viewed: bool
    rate: float
    cpu_share: float
    replies: int

    def cells(self) -> tuple[str, ...]:
        share = f"{self.cpu_share:.2%}" if self.viewed else ""
        rate, name = f"{self.rate:,.0f}", "viewed" if self.viewed else "alone"
        return str(self.round), name, rate, share, str(self.replies) if self.viewed else ""


def measure(job: Job, out: Path, number: int, viewed: bool, steps: int, skip: int) -> ViewRun:
    """One run of the job, in a folder of its own.

    Raises:
        RunFailedError: it failed, or its page did not answer.
    """
    folder = out / f"{number}-{'viewed' if viewed else 'alone'}"
    folder.mkdir(parents=True)
    command = job.command(
        [
            f"trainer.total_training_steps={steps}",
            f"trainer.default_local_dir={quoted(str(folder / 'checkpoints'))}",
            *("trainer.total_epochs=1000000", "trainer.resume_mode=disable", "trainer.logger=[console,file]"),
            *("trainer.save_freq=-1", "trainer.test_freq=-1", f"hydra.run.dir={quoted(str(folder / 'hydra'))}"),
            f"{VIEW}={'127.0.0.1:0' if viewed else 'null'}",
        ]
    )
    viewer = Viewer(folder / LOG_FILE, last_step=steps)
    thread = threading.Thread(target=viewer.look, name="viewer")
    if viewed:
        thread.start()
    try:
        logged = run_logged(
            command,
            folder,
            job.environment(folder),
            steps=steps,
            timeout_s=LONGEST_S,
            group=True,
            on_start=viewer.run_began,
            on_step=viewer.step_logged,
        )
    finally:
        viewer.ended.set()
        if viewed:
            thread.join()
    if viewed and (viewer.refused or viewer.gone or not viewer.replies):
        raise RunFailedError(f"the page did not answer: {viewer.refused or f'{viewer.gone} times'}")
    seconds = logged[-1]["at"]
    share = viewer.cpu_s / seconds / len(psutil.Process().cpu_affinity())
    return ViewRun(number, viewed, rate_of(logged, skip), share, viewer.replies)


def rate_of(steps: Sequence[Step], skip: int) -> float:
    """Trained response tokens a second, from the end of step `skip` to that of the last one."""
    kept = [step for step in steps if step["step"] > skip]
    began = next(step["at"] for step in reversed(steps) if step["step"] <= skip)
    tokens = sum(response_tokens(step["data"]) for step in kept)
    return tokens / float(kept[-1]["at"] - began)


def in_pairs(rounds: int) -> Iterator[tuple[int, bool]]:
    """(round, whether it is viewed) of each run: alone first in every odd round."""
    for number in range(1, rounds + 1):
        yield from ((number, viewed) for viewed in ((False, True) if number % 2 else (True, False)))


def text_of(runs: Sequence[ViewRun]) -> str:
    """The table, and the medians."""
    rates = {(run.round, run.viewed): run.rate for run in runs}
    ratios = [rates[run.round, True] / run.rate for run in runs if not run.viewed]
    shares = [run.cpu_share for run in runs if run.viewed]
    last = f"tokens/s with the page open over tokens/s without: {median(ratios):.3f} ({min(ratios):.3f} to "
    last += f"{max(ratios):.3f}); the view's process took {median(shares):.2%} of the cores' time"
    return f"{text_table(HEADER, [run.cells() for run in runs])}\n{last}\n"


@exits_on_config_error
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 2 with one line for an argument that cannot work, or 3 if a run failed."""
    options = _parser().parse_intermixed_args(argv)
    if not 1 <= options.skip < options.steps:
        raise ConfigError("--skip", options.skip, "leaves nothing to measure", f"Give 1 to {options.steps - 1}")
    if options.rounds < 1:
        raise ConfigError("--rounds", options.rounds, "makes no run", "Give 1 or more")
    out, (target, overrides) = new_folder(options.out), split_job(options.target)
    job, runs = job_named(target, overrides, out), list[ViewRun]()
    for number, viewed in in_pairs(options.rounds):
        try:
            runs.append(measure(job, out, number, viewed, options.steps, options.skip))
        except RunFailedError as error:
            sys.stderr.write(f"{error}\n")
            return RUN_FAILED
        sys.stderr.write("  ".join(runs[-1].cells()) + "\n")
    sys.stdout.write(text_of(runs))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = job_parser("view", __doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("view-cost"), help="a new folder")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=20, help="of a run")
    parser.add_argument("--skip", type=int, default=4, help="steps that are not measured")
    return parser


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
