"""The settings that all arms share: model, data, batches, engine; the command line and environment of one run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from seamless_verl.config.composing import HERE as CONFIGS
from seamless_verl.config.words import quoted
from seamless_verl.errors import ConfigError
from seamless_verl.platform.detect import set_cpu_environment
from seamless_verl.tools.bench.training.arms import MINI_BATCH, VERL, Arm
from seamless_verl.tools.bench.training.workloads import PROMPT_TOKENS, Workload
from seamless_verl.tools.compare.running import METRICS_FILE

DEVICES = 2
MICRO_BATCH_TOKENS = 2048
KV_CACHE_BYTES = 256 << 20  # 65,536 tokens of the small model
MODEL_SIZE = "small"
SPARE_STEPS = 16  # more steps of prompts, which asynchronous modes draw ahead; the data set never repeats
STEPS_FILE, SAMPLES_FILE = "steps.jsonl", "samples.jsonl"


@dataclass(frozen=True)
class BenchPlan:
    """One run: an arm on a workload for `steps` steps, in a folder of its own; `extra` are the user's overrides."""

    workload: Workload
    arm: Arm
    steps: int
    data: Path
    folder: Path
    extra: Mapping[str, str]

    @property
    def overrides(self) -> dict[str, object]:
        return {**shared(self.workload, self.data), **self.run_folders(), **self.arm.overrides, **self.extra}

    def run_folders(self) -> dict[str, object]:
        return {
            "actor_rollout_ref.rollout.agent.agent_loop_config_path": self.folder / "loops.yaml",
            "trainer.default_local_dir": self.folder / "checkpoints",
            "trainer.total_training_steps": self.steps,
            "hydra.run.dir": self.folder / "hydra",
        }

    def command(self) -> list[str]:
        """Both main jobs run under the same supervisor, ours by itself."""
        verl_options = ["--config-dir", str(CONFIGS), "+platform=cpu", "model_engine=megatron"]
        options = [
            f"{key}={quoted(str(value)) if isinstance(value, Path) else value}" for key, value in self.overrides.items()
        ]
        if self.arm.main == VERL:
            module = ["-m", "seamless_verl.tools.bench.training.supervised", VERL, *verl_options]
        else:
            module = ["-m", self.arm.main]
        return [sys.executable, "-W", "ignore", *module, *options]

    def environment(self) -> dict[str, str]:
        """The same for every arm; variables that the user exported stay."""
        env = dict(os.environ)
        set_cpu_environment(env, cores=bench_cores(), devices=DEVICES, pin=True)
        return env | {"HF_HUB_OFFLINE": "1", "VERL_FILE_LOGGER_PATH": str(self.folder / METRICS_FILE)}

    def write_loops(self) -> None:
        """The agent loop's entry. YAML, of which JSON is a part."""
        loop: dict[str, object] = {
            "name": "forced",
            "_target_": "seamless_verl.tools.bench.training.loop.ForcedLengthLoop",
            "workload": self.workload.name,
            "record": str(self.folder / SAMPLES_FILE),
        }
        loop |= {} if self.workload.tool is None else {"turn_s": self.workload.tool.mean}
        (self.folder / "loops.yaml").write_text(json.dumps([loop]))


def shared(workload: Workload, data: Path) -> dict[str, object]:
    """Overrides of every arm; settings that differ between arms are in the arms."""
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    return {
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "val.parquet",
        "data.train_batch_size": workload.prompts,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": workload.response_tokens,
        "data.dataloader_num_workers": 0,
        "data.shuffle": False,
        "algorithm.adv_estimator": "grpo",
        "algorithm.rollout_correction.bypass_mode": True,
        "actor_rollout_ref.model.path": data / "model",
        f"{actor}.ppo_mini_batch_size": MINI_BATCH,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": MICRO_BATCH_TOKENS,
        f"{actor}.optim.lr": 1e-4,
        f"{rollout}.n": workload.samples,
        f"{rollout}.max_model_len": PROMPT_TOKENS + workload.response_tokens,
        f"{rollout}.max_num_seqs": workload.seats,
        f"{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes": KV_CACHE_BYTES,
        f"{rollout}.agent.default_agent_loop": "forced",
        "reward.custom_reward_function.path": Path(__file__).with_name("reward.py"),
        "reward.custom_reward_function.name": "compute_score",
        "trainer.logger": "[console,file]",
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
    }


def bench_cores() -> list[int]:
    """The two cores of a bench; ConfigError where there is only one."""
    cores = sorted(os.sched_getaffinity(0))[:DEVICES]
    if len(cores) < DEVICES:
        way_out = "Run it where `taskset -cp $$` lists two cores"
        raise ConfigError("cores", cores, f"the arms train on {DEVICES} devices of a core each", way_out)
    return cores


def make_data(workload: Workload, steps: int, folder: Path) -> None:
    """Writes model and prompts; the same for the same sizes."""
    from seamless_verl.tiny import make_model

    make_model(MODEL_SIZE, 0, folder / "model")
    make_prompts(workload, steps, folder)


def make_prompts(workload: Workload, steps: int, folder: Path) -> None:
    """Writes `train.parquet`, whose rows are numbered, and a `val.parquet` that verl needs and no arm reads."""
    from seamless_verl.tiny import make_arithmetic

    make_arithmetic(folder, 0, (steps + SPARE_STEPS) * workload.prompts, workload.prompts)
