"""Names what a run uses that no test of this package has trained: `check` accepts it on faith, and says so.

UNTRAINED are settings of verl's that change what is computed, with the values that tests train; MODELS are of a model's
config. A unit test reads the tests that train. It fails by the row's name when one of them sets another value, or when
a value that counts as trained is in none of them: whoever trains something new adds its value, or takes its row out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from seamless_verl.config.model import MODEL, model_config, text_config
from seamless_verl.config.roles import uses_megatron
from seamless_verl.config.settings import Settings
from seamless_verl.config.verl_keys import ENGINE, ESTIMATOR, LOSS_MODE
from seamless_verl.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"


class Untrained(NamedTuple):
    """A setting and its values that need no word: verl's default, and those that tests train."""

    name: str
    key: str
    known: tuple[object, ...] = (None, False)


UNTRAINED = (
    Untrained("another engine", ENGINE, (None, "megatron", "dp")),
    Untrained("another engine", f"{ACTOR}.strategy", (None, "megatron", "fsdp2")),
    Untrained("adapters", f"{MODEL}.lora.rank", (None, 0, 8)),
    Untrained("adapters", f"{MODEL}.lora_rank", (None, 0, 8)),
    Untrained("expert parallelism", f"{MEGATRON}.expert_model_parallel_size", (None, 1, 2)),
    Untrained("context parallelism", f"{MEGATRON}.context_parallel_size", (None, 1)),
    Untrained("virtual pipeline stages", f"{MEGATRON}.virtual_pipeline_model_parallel_size", (None,)),
    Untrained("offloading", f"{MEGATRON}.param_offload"),
    Untrained("offloading", f"{MEGATRON}.optimizer_offload"),
    Untrained("fused kernels", f"{MODEL}.use_fused_kernels"),
    Untrained("multi-token prediction", f"{MODEL}.mtp.enable"),
    Untrained("a reward model", "reward.reward_model.enable"),
    Untrained("a KL loss", f"{ACTOR}.use_kl_loss"),
    Untrained("KL in rewards", "algorithm.use_kl_in_reward"),
    Untrained("filtered groups", "algorithm.filter_groups.enable"),
    Untrained("several epochs", f"{ACTOR}.ppo_epochs", (None, 1)),
    Untrained(
        "an estimator", ESTIMATOR, (None, "grpo", "grpo_novelty", "hgpo", "mc_grpo", "reinforce_plus_plus_baseline")
    ),
    Untrained("a loss", LOSS_MODE, (None, "vanilla", "dppo_tv", "interpolated", "m2po")),
    Untrained("data-parallel engines", f"{ROLLOUT}.data_parallel_size", (None, 1)),
    Untrained("pipelines of engines", f"{ROLLOUT}.pipeline_model_parallel_size", (None, 1)),
    Untrained("quantized engines", f"{ROLLOUT}.quantization", (None,)),
    Untrained("a transport of weights", f"{ROLLOUT}.checkpoint_engine.backend", (None, "naive", "gloo")),
)
MIXTURE, IMAGES = "a mixture of experts", "images"
MODELS = {
    "num_experts": MIXTURE,
    "num_local_experts": MIXTURE,
    "n_routed_experts": MIXTURE,
    "vision_config": IMAGES,
}
TRAINED_MIXTURES = ("qwen3_moe", "mixtral", "glm4_moe")
TRAINED_VISION = ("qwen2_5_vl",)  # by FSDP
LINE_BEGINS = "accepted, never run here: "
GPU = "a GPU (scripts/gpu_check tries one)"


def on_faith(settings: Settings) -> str | None:
    """One line with what of this run no test trains; None where there is nothing, or another trainer runs."""
    names = list(dict.fromkeys(_names(settings))) if settings.mode == "seamless" else []
    return f"{LINE_BEGINS}{', '.join(names)}" if names else None


def _names(settings: Settings) -> Iterator[str]:
    if settings.host.accelerator:
        yield GPU
    for one in UNTRAINED:
        if (value := settings.get(one.key)) not in one.known:
            yield f"{one.name} ({one.key.rpartition('.')[2]}={value})"
    try:
        config = model_config(settings, MODEL) or {}
    except ConfigError:  # which other checks report
        return
    kind = config.get("model_type")
    trained = {MIXTURE} if kind in TRAINED_MIXTURES else set()
    if kind in TRAINED_VISION and not uses_megatron(settings):
        trained.add(IMAGES)
    found = (name for key, name in MODELS.items() if config.get(key) or text_config(config).get(key))
    yield from (name for name in found if name not in trained)
