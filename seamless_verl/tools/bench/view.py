"""What the live view costs a run: `python -m seamless_verl.tools.bench.view [RECIPE|CONFIG.yaml] [KEY=VALUE ...]`.

It is a comparison of two arms, `alone` and `viewed`, which has `seamless.view=127.0.0.1:0` and a client that asks for
what the page's overview asks for, as often. Beside the comparison's report are printed what the view's process took of
each run, as a share of all cores' time, and the replies. That share is what the view can cost at most; the ratio of
tokens/s has the noise of the machine in it.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from seamless_verl.cli.output import text_table
from seamless_verl.errors import exits_on_config_error
from seamless_verl.tools.bench.shared import RUN_FAILED, cpu_s, job_parser, new_folder
from seamless_verl.tools.compare.arms import parse_arms
from seamless_verl.tools.compare.command import make, prepared, split_job
from seamless_verl.tools.compare.job import Options, job_named
from seamless_verl.tools.compare.running import LOG_FILE, METRICS_FILE, exit_on_signals
from seamless_verl.tools.compare.series import RunSeries

ADDRESS = re.compile(r"The view of this run: (http\S+)")
MODULE = "seamless_verl.tools.view"
ASKS = ("api/run", "api/devices?columns=1000&last=600", "api/metrics")  # of `assets/main.js`, `overview.js`, `lanes.js`
ARMS = "alone:seamless.view=null,viewed:seamless.view=127.0.0.1:0"
EVERY_S = 4.0  # LIVE_MS of assets/main.js
HEADER = ("run", "tokens/s", "view's CPU", "replies")


@dataclass
class Viewer:
    """A client of the page of whichever run is viewed, in a thread of its own, until its last step: the page then ends.

    By the folders of runs: `replies`, and `cpu_s` of the view's process. `missing` are replies that did not come.
    """

    out: Path
    last_step: int
    replies: dict[str, int] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        """Asks until `ended`, from when a run has printed its address."""
        while not self.ended.wait(EVERY_S):
            for log in self.out.glob(f"viewed-*/{LOG_FILE}"):
                address = ADDRESS.search(log.read_text(errors="replace"))
                if address is not None and self.goes_on(log.parent):
                    for path in ASKS:
                        self.ask(log.parent, address[1].rstrip("/"), path)
                    with suppress(psutil.NoSuchProcess):  # the run has ended
                        found = [one for one in psutil.Process().children(recursive=True) if MODULE in one.cmdline()]
                        if found:
                            self.cpu_s[log.parent.name] = cpu_s(found)

    def goes_on(self, folder: Path) -> bool:
        metrics = folder / METRICS_FILE
        return not metrics.exists() or len(metrics.read_bytes().splitlines()) < self.last_step

    def ask(self, folder: Path, address: str, path: str) -> None:
        try:
            status = str(httpx.get(f"{address}/{path}", timeout=30).status_code)
        except httpx.TransportError as error:
            status = repr(error)
        if status == "200":
            self.replies[folder.name] = self.replies.get(folder.name, 0) + 1
        elif self.goes_on(folder):  # the run may end while it is asked
            self.missing.append(f"{folder.name}, {path}: {status}")


def rows(series: RunSeries, viewer: Viewer) -> list[tuple[str, ...]]:
    """A row for each finished run: its tokens/s, and of a viewed one the share of the cores' time, and the replies."""
    found, cores = list[tuple[str, ...]](), len(psutil.Process().cpu_affinity())
    for run in series.runs:
        if run.figures is not None:
            folder, seconds = series.planned[run.key].folder.name, run.steps[-1].at_s
            viewed = run.arm == "viewed"
            share = f"{viewer.cpu_s.get(folder, 0.0) / seconds / cores:.2%}" if viewed else ""
            replies = str(viewer.replies.get(folder, 0)) if viewed else ""
            found.append((folder, f"{run.figures.tokens_per_s:,.0f}", share, replies))
    return found


@exits_on_config_error
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 2 with one line for an argument that cannot work, or 3 if a run failed or a page did not answer."""
    parser = job_parser("view", __doc__)
    parser.add_argument("--out", type=Path, default=Path("view-cost"), help="a new folder")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=20, help="of a run")
    parser.add_argument("--skip", type=int, default=4, help="steps that are not measured")
    options = parser.parse_intermixed_args(argv)
    plan = Options(options.steps, options.skip, seeds=(1,), rounds=options.rounds)
    plan.check()
    out, (target, overrides) = new_folder(options.out), split_job(options.target)
    series = prepared(job_named(target, overrides, out), parse_arms(ARMS), plan, out)
    viewer = Viewer(out, options.steps)
    thread = threading.Thread(target=viewer.look, name="viewer")
    thread.start()
    try:
        failed = make(series) != 0
    finally:
        viewer.ended.set()
        thread.join()
    found = rows(series, viewer)
    sys.stdout.write(f"{text_table(HEADER, found)}\n")
    if viewer.missing or any(replies == "0" for *_, replies in found):
        sys.stderr.write(f"the page did not answer: {viewer.missing}\n")
        return RUN_FAILED
    return RUN_FAILED if failed else 0


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
