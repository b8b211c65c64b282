"""The last lines of the console, for each way in which a run can end early: the cause, the way out, and how to go on.

They are kept in `last_screens.txt` without numbers, ids and folders; SEAMLESS_SNAPSHOT=1 writes that file anew. A
trainer worker that the kernel kills when memory is short is killed by the same signal as here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.job import AGENT, Job
from support.job_ends import leftovers
from support.paths import DATA, ROOT
from support.shared_memory import check_nothing_left, pieces

from seamless_verl.runtime.console import ENDED_EARLY
from seamless_verl.runtime.step_metrics import StepMetrics
from seamless_verl.trainer.step_log import REWARD

pytestmark = [pytest.mark.integration, pytest.mark.long]
SCREENS = Path(__file__).with_name("last_screens.txt")
LINES = 20
BEGINNINGS = ("The run failed; ", "Removed ", "A part of ", "An incomplete ", ENDED_EARLY)  # of the supervisor's lines
SAVING = "the run ended while it was written"  # a checkpoint: there is such a line where a signal comes within a save
Act = Callable[[Job], None]


def kill(*words: str) -> Act:
    """Kills the first process with one of these words in its command line."""

    def act(job: Job) -> None:
        _named(job, *words).kill()

    return act


def _named(job: Job, *words: str) -> psutil.Process:
    return next(one for one in job.descendants() if any(word in " ".join(one.cmdline()) for word in words))


def send(number: int) -> Act:
    def act(job: Job) -> None:
        assert job.process is not None
        job.process.send_signal(number)

    return act


def kill_driver(job: Job) -> None:
    assert job.process is not None
    psutil.Process(job.process.pid).children()[0].kill()


def stop_trainer(job: Job) -> None:
    _named(job, "WorkerDict").suspend()


def due(job: Job) -> None:
    (job.folder / "due").touch()


def make_read_only(job: Job) -> None:
    """For root, too: nothing is made in it, or removed. A read-only mount is refused while a file is open."""
    subprocess.run(["chattr", "+i", str(job.folder / "small")], check=True)


def wait(job: Job) -> None:
    """It ends by itself."""


def rewarded(name: str) -> dict[str, Any]:
    return {
        "reward.custom_reward_function.path": DATA / "ending_reward.py",
        "reward.custom_reward_function.name": name,
    }


SAVED = {"trainer.save_freq": 1, "trainer.resume_mode": "auto"}
SMALL = {"trainer.default_local_dir": "small"}  # relative to the job's folder
WAYS: dict[str, tuple[dict[str, Any], Act]] = {
    "the reward function calls os._exit": (rewarded("exits"), due),
    "the reward function raises": (rewarded("raises"), due),
    "an agent loop worker is killed too often": ({"seamless.restarts": 0}, kill("SeamlessAgentLoopWorker")),
    "a trainer worker is killed": ({}, kill("WorkerDict")),
    "the task runner is killed": ({}, kill("SeamlessTaskRunner")),
    "the last replica is killed": ({"seamless.restarts": 0}, kill("SeamlessServer")),
    "TransferQueue is killed": ({}, kill("TransferQueueController")),
    "the driver is killed": (SAVED, kill_driver),
    "Ray's GCS is killed": ({}, kill("gcs_server")),
    "Ray's raylet is killed": ({}, kill("raylet/raylet")),
    "SIGTERM": (SAVED, send(signal.SIGTERM)),
    "Ctrl-C": ({}, send(signal.SIGINT)),
    "nothing moves": ({"seamless.watchdog.no_progress_s": 15}, stop_trainer),
    "the checkpoint folder is full": ({**SAVED, **SMALL, "trainer.total_training_steps": 50}, wait),
    "the checkpoint folder is read-only": ({**SAVED, **SMALL}, make_read_only),
    "the journal's disk is full": ({**AGENT, "seamless.gateway.journal": "small/journal.sqlite"}, wait),
    "the trainer raises": ({"trainer.rollout_data_dir": "/proc/none"}, wait),
}
SIZES = {
    "the checkpoint folder is full": "24m",
    "the checkpoint folder is read-only": "1g",
    "the journal's disk is full": "600k",
}


@contextmanager
def small_disk(folder: Path, size: str | None) -> Iterator[None]:
    """A file system of this size in the folder `small`, where one is needed."""
    if size is None:
        yield
        return
    if os.getuid() != 0:
        pytest.skip("only root makes file systems")
    (small := folder / "small").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(small)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def screen(job: Job, code: int) -> str:
    """The supervisor's lines among the last ones, without what differs from run to run."""
    last = job.log().splitlines()[-LINES:]
    begin = next(number for number, line in enumerate(last) if line.startswith(BEGINNINGS))
    last = [line for line in last[begin:] if not line.endswith(SAVING)]
    text = "\n".join([f"exit code {code}", *last])
    for path, name in ((job.folder, "RUN"), (ROOT, "ROOT"), (Path(os.__file__).parent, "PYTHON")):
        text = text.replace(str(path), name)
    text = re.sub(r"\S*/site-packages", "PACKAGES", text)
    text = re.sub(r"(?<=was at: )[^.\n]+|(?<=the trainer \()[^)\n]+", "STAGE", text)
    text = re.sub(r"\b[0-9a-f]{8,}(-[0-9a-f]{4,})*\b", "ID", text)
    return re.sub(r"(?<!code )\b\d+(\.\d+)*\b|(?<=_)\d+\b", "N", text)


def kept_screens() -> dict[str, str]:
    sections = SCREENS.read_text().split("\n## ") if SCREENS.exists() else []
    return dict(section.removeprefix("## ").strip().split("\n", 1) for section in sections)


@pytest.mark.parametrize("way", WAYS)
def test_a_run_ends_with_its_cause_the_way_out_and_how_to_go_on(nano: Path, tmp_path: Path, way: str) -> None:
    options, act = WAYS[way]
    before, overrides = pieces(), {"trainer.total_training_steps": 500, **options}
    with small_disk(tmp_path, SIZES.get(way)):
        job = Job(tmp_path, nano, overrides, {"ENDS_WHEN": str(tmp_path / "due")}).start()
        assert job.process is not None
        try:
            if act is not wait:
                job.wait_for("step:2 ")
            act(job)
            code = job.process.wait(180)
        finally:
            if job.process.poll() is None:
                job.stop(signal.SIGTERM)
    found, kept = screen(job, code), kept_screens()
    if os.environ.get("SEAMLESS_SNAPSHOT"):
        SCREENS.write_text(
            "\n\n".join(f"## {name}\n{text}" for name, text in sorted((kept | {way: found}).items())) + "\n"
        )
    else:
        assert found == kept[way]
    assert leftovers(job) == []
    check_nothing_left(before)


def test_steps_have_their_lines_whatever_becomes_of_rays_log_monitor_and_of_the_supervisor(
    nano: Path, tmp_path: Path
) -> None:
    """A line of 10 MB ends what Ray's driver shows; its log monitor is killed; and the supervisor in a save."""
    overrides = {"trainer.total_training_steps": 500, **SAVED, **rewarded("prints")}
    job = Job(tmp_path, nano, overrides, {"ENDS_WHEN": str(tmp_path / "due")}).start()
    assert job.process is not None
    try:
        job.wait_for("step:2 ")
        due(job)
        job.wait_for(f"step:{last_shown(job) + 5} ")
        assert not (tmp_path / "due").exists()
        kill("log_monitor.py")(job)
        job.wait_for("Ray's log monitor has ended")
        job.wait_for(f"step:{last_shown(job) + 3} ")
        processes, step = job.descendants(), tracked(job)
        while tracked(job) == step:
            pass
        job.process.kill()
    finally:
        if job.process.poll() is None:
            job.stop(signal.SIGTERM)
    # Ray's agents first report the end of their raylet to its GCS, which has ended, too: for a minute
    assert not psutil.wait_procs(processes, timeout=150)[1]
    rows = {row.step: row for row in StepMetrics(tmp_path / "checkpoints" / "metrics.jsonl").rows()}
    assert rows.keys() >= set(range(1, tracked(job) + 1)), "a resumed run goes on after a step without a line"
    assert all(rows[step].number(REWARD) is not None for step in rows)


def last_shown(job: Job) -> int:
    return max(map(int, re.findall(r"^step:(\d+) ", job.log(), re.MULTILINE)))


def tracked(job: Job) -> int:
    text = (job.folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text()
    return int(text or 0)
