"""Layouts of clusters as a user would write them: a model of a published size, machines by tags, and verl's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from seamless_verl.config.adopting import adopt_resources
from seamless_verl.config.checks import Settings
from support.config import compose_ours, write_rows
from support.paths import DATA

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODELS = DATA / "models"  # the published architectures' sizes
NCCL = f"{ROLLOUT}.checkpoint_engine.backend=nccl"
COMMON = (
    "platform=accelerator",
    "algorithm.adv_estimator=grpo",
    "trainer.logger=[console]",
    "trainer.save_freq=-1",
    "data.train_batch_size=64",
    "data.max_prompt_length=1024",
    "data.max_response_length=8192",
    f"{ACTOR}.ppo_mini_batch_size=64",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=12288",
    f"{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",
    f"+{ACTOR}.megatron.override_transformer_config.recompute_method=uniform",
    f"+{ACTOR}.megatron.override_transformer_config.recompute_num_layers=1",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.n=8",
    f"{ROLLOUT}.gpu_memory_utilization=0.6",
    "seamless.device_memory_gb=80",
    "seamless.host_memory_gb=1000",
)
OFFLOAD = tuple(f"{ACTOR}.megatron.{name}_offload=True" for name in ("param", "optimizer"))
HALF = (f"{ROLLOUT}.gpu_memory_utilization=0.5",)
OPTIMIZER_ON_HOST = (f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True",)


@dataclass(frozen=True)
class Case:
    """A layout: `machines` are groups of `seamless.resources`, `sizes` TP, PP, EP of the trainer, TP of a replica."""

    name: str
    model: str
    devices: int
    machines: str
    sizes: tuple[int, int, int, int]
    layout: str
    handover: str
    more: tuple[str, ...] = ()

    @property
    def overrides(self) -> list[str]:
        tensor, pipeline, expert, replica = self.sizes
        return [
            *COMMON,
            f"seamless.resources=[{self.machines}]",
            f"actor_rollout_ref.model.path={MODELS / self.model}",
            f"{ACTOR}.megatron.tensor_model_parallel_size={tensor}",
            f"{ACTOR}.megatron.pipeline_model_parallel_size={pipeline}",
            f"{ACTOR}.megatron.expert_model_parallel_size={expert}",
            f"{ROLLOUT}.tensor_model_parallel_size={replica}",
            *((NCCL,) if self.layout != "colocated" else ()),
            *((f"{ACTOR}.megatron.expert_tensor_parallel_size=1",) if expert > 1 else ()),
            *self.more,
        ]


def machines(both: int = 0, train: int = 0, rollout: int = 0, devices: int = 8) -> str:
    """Groups of so many machines of each kind, for `seamless.resources`."""
    tags = {"train, rollout": both, "train": train, "rollout": rollout}
    return ", ".join(f"{{count: {n}, devices: {devices}, tags: [{names}]}}" for names, n in tags.items() if n)


LAYOUTS = (
    Case("8B on 1", "qwen3_8b", 1, machines(1, devices=1), (1, 1, 1, 1), "colocated", "released",
         (*OPTIMIZER_ON_HOST, *OFFLOAD[:1])),
    Case("8B on 8", "qwen3_8b", 8, machines(1), (4, 1, 1, 1), "colocated", "released"),
    Case("8B on 8, small cache", "qwen3_8b", 8, machines(1), (4, 1, 1, 1), "colocated", "resident",
         (f"{ROLLOUT}.gpu_memory_utilization=0.35",)),
    Case("8B on 32", "qwen3_8b", 32, machines(2, rollout=2), (2, 1, 1, 1), "multiplexed", "released", HALF),
    Case("8B on 32, apart", "qwen3_8b", 32, machines(train=1, rollout=3), (2, 1, 1, 1), "disaggregated", "resident"),
    Case("8B on 64", "qwen3_8b", 64, machines(4, rollout=4), (2, 1, 1, 1), "multiplexed", "released", HALF),
    Case("32B on 8", "qwen3_32b", 8, machines(1), (8, 1, 1, 4), "colocated", "released", OPTIMIZER_ON_HOST),
    Case("32B on 32", "qwen3_32b", 32, machines(4), (8, 1, 1, 4), "colocated", "released", OFFLOAD),
    Case("32B on 32, apart", "qwen3_32b", 32, machines(train=2, rollout=2), (8, 1, 1, 4), "disaggregated", "resident"),
    Case("32B on 64", "qwen3_32b", 64, machines(4, rollout=4), (8, 2, 1, 4), "multiplexed", "released"),
    Case("30B-A3B on 8", "qwen3_30b_a3b", 8, machines(1), (1, 1, 8, 4), "colocated", "released",
         (*OPTIMIZER_ON_HOST, *OFFLOAD[:1])),
    Case("30B-A3B on 32", "qwen3_30b_a3b", 32, machines(2, rollout=2), (1, 1, 8, 4), "multiplexed", "released",
         OFFLOAD),
    Case("30B-A3B on 64, apart", "qwen3_30b_a3b", 64, machines(train=4, rollout=4), (1, 1, 8, 4), "disaggregated",
         "resident"),
)  # fmt: skip


def composed(case: Case, folder: Path, *overrides: str) -> DictConfig:
    """The config of a run of this layout, with data in `folder`."""
    data = [f"data.{name}_files={write_rows(folder / f'{name}.parquet')}" for name in ("train", "val")]
    config = compose_ours(*case.overrides, *data, f"trainer.default_local_dir={folder}", *overrides)
    adopt_resources(config)
    return config


def settings_of(config: DictConfig) -> Settings:
    return Settings.of(config, devices=None, accelerator=True)
