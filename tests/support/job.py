"""Runs whole training jobs as a user would, and reads what they logged."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from seamless_verl.journal import JournalReader
from support.paths import DATA, ROOT

VERL, SEAMLESS = "verl.trainer.main_ppo", "seamless_verl.main_ppo"
CONFIGS = ROOT / "seamless_verl" / "config"
POOL: dict[str, Any] = {
    "actor_rollout_ref__rollout__nnodes": 1,
    "actor_rollout_ref__rollout__n_gpus_per_node": 1,
    "actor_rollout_ref__rollout__checkpoint_engine__backend": "gloo",
}
AGENT: dict[str, Any] = {
    "seamless__gateway__enabled": True,
    "actor_rollout_ref__rollout__agent__agent_loop_config_path": DATA / "openai_loops.yaml",
    "actor_rollout_ref__rollout__agent__default_agent_loop": "openai",
    "data__max_response_length": 32,
}


@dataclass
class Job:
    """One command line with its own folder and TMPDIR; call `start`, then `finish` or `stop`.

    Keys of overrides may have `__` for a dot.
    """

    folder: Path
    data: Path
    overrides: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict)
    main: str = SEAMLESS
    process: subprocess.Popen[str] | None = None
    temporary: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="t")))  # short, for sockets

    def command(self) -> list[str]:
        base = {
            "data.train_files": self.data / "train.parquet",
            "data.val_files": self.data / "val.parquet",
            "data.train_batch_size": 8,
            "data.max_prompt_length": 64,
            "data.max_response_length": 8,
            "data.dataloader_num_workers": 0,
            "algorithm.adv_estimator": "grpo",
            "algorithm.rollout_correction.bypass_mode": False,  # the trainer computes logprobs, which tests compare
            "actor_rollout_ref.model.path": self.data / "model",
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
            "actor_rollout_ref.actor.optim.lr": 1e-3,
            "actor_rollout_ref.rollout.n": 4,
            "actor_rollout_ref.rollout.max_model_len": 128,
            "reward.custom_reward_function.path": DATA / "reward.py",
            "reward.custom_reward_function.name": "compute_score",
            "trainer.logger": "[console,file]",
            "trainer.val_before_train": False,
            "trainer.resume_mode": "disable",
            "trainer.default_local_dir": self.folder / "checkpoints",
            "hydra.run.dir": self.folder / "hydra",
        }
        vanilla = ["--config-dir", str(CONFIGS), "+platform=cpu", "model_engine=megatron"] if self.main == VERL else []
        given = {key.replace("__", "."): value for key, value in self.overrides.items()}
        options = [f"{key}={value}" for key, value in (base | given).items()]
        return [sys.executable, "-W", "ignore", "-m", self.main, *vanilla, *options]

    def start(self) -> Job:
        self.folder.mkdir(parents=True, exist_ok=True)
        env = os.environ | {
            "VERL_PLATFORM": "cpu",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{ROOT}:{DATA}",
            "VERL_FILE_LOGGER_PATH": str(self.folder / "metrics.jsonl"),
            "TMPDIR": str(self.temporary),
        }
        with (self.folder / "log.txt").open("w") as log:
            self.process = subprocess.Popen(
                self.command(), cwd=self.folder, env=env | self.env, stdout=log, stderr=subprocess.STDOUT, text=True
            )
        return self

    def finish(self, timeout: float = 420) -> Job:
        """Waits for success; a failure shows the end of the log."""
        assert self.process is not None
        try:
            code = self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                self.stop(signal.SIGTERM)
        assert code == 0, self.log()[-6000:]
        return self

    def stop(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def wait_for(self, text: str, timeout: float = 240) -> None:
        """Returns once the log contains `text`."""
        deadline = time.monotonic() + timeout
        while text not in self.log():
            assert time.monotonic() < deadline and self.process and self.process.poll() is None, self.log()[-4000:]
            time.sleep(0.1)

    def metrics(self) -> dict[int, dict[str, float]]:
        """The metrics that verl logged, by step."""
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        merged: dict[int, dict[str, float]] = {}
        for row in rows:
            merged.setdefault(row["step"], {}).update(row["data"])
        return merged

    def descendants(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)


CLOCKS = re.compile(r"^(timing_|perf/(time_per_step|throughput|mfu)|actor/perf/|.*memory)")


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics without those that measure time or memory."""
    return {name: value for name, value in metrics.items() if not CLOCKS.match(name)}


def run(folder: Path, data: Path, main: str = SEAMLESS, env: dict[str, str] | None = None, **overrides: Any) -> Job:
    """Runs a job to its end."""
    return Job(folder, data, overrides, env or {}, main).start().finish()


def check_record(job: Job, sessions: int, shards: int = 1) -> None:
    """Checks that the journals of a run of AGENT have its sessions of two turns, the second on the first's tokens."""
    names = ["trajectories.sqlite"] if shards == 1 else [f"trajectories-{shard}.sqlite" for shard in range(shards)]
    readers = [JournalReader(job.folder / "checkpoints" / name) for name in names]
    finished = [[session for session in reader.sessions() if session.reason == "finished"] for reader in readers]
    assert sum(map(len, finished)) >= sessions and {session.calls for rows in finished for session in rows} == {2}
    for reader, rows in zip(readers, finished, strict=True):
        record = reader.read(rows[0].session_id)
        assert record is not None
        first, second = record.calls
        whole = first.prompt_ids + first.turn().generated_ids
        assert second.prompt_ids[: len(whole)] == whole


def small_run(nano: Path) -> list[str]:
    """Overrides of a small run with agents, for commands that make the run themselves; DATA is on PYTHONPATH."""
    options = AGENT | {
        "data__train_files": nano / "train.parquet",
        "data__val_files": nano / "val.parquet",
        "data__train_batch_size": 8,
        "data__max_prompt_length": 64,
        "data__dataloader_num_workers": 0,
        "algorithm__adv_estimator": "grpo",
        "actor_rollout_ref__model__path": nano / "model",
        "actor_rollout_ref__actor__ppo_mini_batch_size": 8,
        "actor_rollout_ref__actor__use_dynamic_bsz": True,
        "actor_rollout_ref__rollout__n": 4,
        "actor_rollout_ref__rollout__max_model_len": 128,
        "reward__custom_reward_function__path": DATA / "reward.py",
        "reward__custom_reward_function__name": "compute_score",
        "trainer__val_before_train": False,
        "trainer__save_freq": 4,
    }
    return [f"{key.replace('__', '.')}={value}" for key, value in options.items()]
