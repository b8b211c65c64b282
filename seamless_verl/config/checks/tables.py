"""What the hosts support and which versions were verified, as data; a contract test holds it to the hosts."""

from __future__ import annotations

from dataclasses import dataclass

# mbridge 0.15.1, `AutoBridge.list_supported_models()`.
MBRIDGE_MODEL_TYPES = (
    "deepseek_v3",
    "gemma3",
    "glm4_moe",
    "glm4v",
    "glm4v_moe",
    "internvl_chat",
    "llama",
    "mimo",
    "mixtral",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
)

# vllm 0.29.0, `CPUAttentionBackend.get_supported_head_sizes()` in v1/attention/backends/cpu_attn.py.
VLLM_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

# transformers 5.10.4: types that derive a missing `head_dim` from the hidden size, with no other default.
DERIVED_HEAD_DIM = ("llama", "mixtral", "qwen2", "qwen2_moe")

# verl 0.9.1, `ADV_ESTIMATOR_REGISTRY` and `POLICY_LOSS_REGISTRY` in trainer/ppo/core_algos.py.
ADVANTAGES = (
    "gae",
    "gdpo",
    "gpg",
    "grpo",
    "grpo_passk",
    "grpo_vectorized",
    "opo",
    "optimal_token_baseline",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "rloo_vectorized",
    "tir_optimal_token_baseline",
)
POLICY_LOSSES = (
    "bypass_mode",
    "cispo",
    "clip_cov",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "geo_mean",
    "gpg",
    "gspo",
    "kl_cov",
    "sapo",
    "vanilla",
)

# verl 0.9.1, `Tracking` in utils/tracking.py: what it imports for each.
LOGGERS: dict[str, str | None] = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "vemlp_wandb": "volcengine_ml_platform",
    "tensorboard": "tensorboard",
    "console": None,
    "clearml": "clearml",
    "trackio": "trackio",
    "file": None,
    "rl_insight": "rl_insight",
    "tracking": "wandb",
}


@dataclass(frozen=True)
class Verified:
    """Distributions under one import name, and the verified range; `newest` None: verified from git, open."""

    distributions: tuple[str, ...]
    oldest: str
    newest: str | None


VERIFIED_CPU = {
    "verl": Verified(("verl",), "0.9.1", "0.9.1"),
    "ray": Verified(("ray",), "2.60.0", "2.60.0"),
    "transfer_queue": Verified(("TransferQueue",), "0.1.11", "0.1.11"),
    "transformers": Verified(("transformers",), "5.10.4", "5.10.4"),
    "vllm": Verified(("vllm-cpu", "vllm"), "0.27.1", "0.31.0"),
    "megatron": Verified(("megatron-core",), "0.16.1", "0.16.1"),
    "mbridge": Verified(("mbridge",), "0.15.1", "0.15.1"),
}

VERIFIED_CUDA = VERIFIED_CPU | {
    "transformers": Verified(("transformers",), "5.9.0", "5.10.4"),
    "vllm": Verified(("vllm",), "0.24.0", "0.24.0"),
    "megatron": Verified(("megatron-core",), "0.16.1", None),
}
