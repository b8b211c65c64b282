"""A training run whose agents are run by another process, which asks the run for tasks over HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.job import AGENT, Job
from support.paths import DATA, ROOT

from seamless_verl.client import AdminFile
from seamless_verl.journal import JournalReader

pytestmark = [pytest.mark.integration, pytest.mark.slowest(6)]
OPTIONS = AGENT | {
    "actor_rollout_ref__rollout__agent__agent_loop_config_path": DATA / "runner_loops.yaml",
    "actor_rollout_ref__rollout__agent__default_agent_loop": "fleet",
    "data__max_response_length": 64,
    "seamless__max_staleness": 0,  # so that the trainer's logprobs are of the same weights
    "trainer__total_training_steps": 2,
}


def start_runner(file: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "seamless_verl.cli", "runner", "--admin-file", str(file), "--slots", "32"]
    agent = f"two_calls={DATA / 'runner_agent.py'}:run"
    with log.open("wb") as output:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen([*command, "--agent", agent], env=env, stdout=output, stderr=subprocess.STDOUT)


def test_a_runner_in_another_process_is_trained(nano: Path, tmp_path: Path) -> None:
    journal = tmp_path / "checkpoints" / "trajectories.sqlite"
    file, log = AdminFile.beside(journal), tmp_path / "runner.txt"
    job = Job(tmp_path, nano, OPTIONS).start()
    runner: subprocess.Popen[bytes] | None = None
    try:
        limit = time.monotonic() + 200
        while not file.exists():
            assert job.process is not None and job.process.poll() is None and time.monotonic() < limit, job.log()[
                -4000:
            ]
            time.sleep(0.2)
        assert file.stat().st_mode & 0o777 == 0o600
        runner = start_runner(file, log)
        job.finish()
        assert not file.exists(), "the run has ended"
        runner.send_signal(signal.SIGTERM)
        assert runner.wait(120) == 0, log.read_text()
    finally:
        for process in (runner, job.process):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
    steps = job.metrics()
    assert steps.keys() == {1, 2}
    for metrics in steps.values():
        assert metrics["actor/grad_norm"] > 0
        assert metrics["training/rollout_logprob_diff_max"] < 2e-2
        dropped = sum(value for name, value in metrics.items() if name.startswith("tokens/dropped/"))
        assert metrics["tokens/generated"] == metrics["tokens/trained"] + dropped > 0
        assert metrics["runner_tasks/lost"] == metrics["runner_tasks/unclaimed"] == 0
    events = Counter(event.kind for event in JournalReader(journal).outside_events())
    assert events["done"] >= 2 * 8 * 4 and not events["lost"] and not events["refused"], events
