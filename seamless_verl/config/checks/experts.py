"""Checks of a mixture of experts that mbridge takes from HF to Megatron, and back at each commit.

Sources: mbridge/models/{mixtral,qwen2moe,qwen3moe}.py, mbridge/core/bridge.py `export_weights` and
`_weight_merge_across_tp`, megatron/core/transformer/moe/moe_utils.py `topk_routing_with_score_function`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seamless_verl.config.model import MODEL, model_config, text_config
from seamless_verl.config.roles import MEGATRON, VANILLA, trainer_sizes, uses_megatron
from seamless_verl.config.settings import Problem, Settings, check
from seamless_verl.resources.model_facts import EXPERT_COUNTS
from seamless_verl.resources.parallel import ParallelSizes

PRE_SOFTMAX = f"{MEGATRON}.override_transformer_config.moe_router_pre_softmax"
BY_MBRIDGE = {"mixtral": True, "qwen2_moe": True, "qwen3_moe": False}  # its value where none is set
EXPERT_TENSOR = f"{MEGATRON}.expert_tensor_parallel_size"


def mixture(settings: Settings) -> Mapping[str, Any] | None:
    """The text model's config where it is a mixture that mbridge takes; None elsewhere."""
    if not uses_megatron(settings) or not settings.flag(VANILLA):
        return None
    config = model_config(settings, MODEL)
    text = {} if config is None else text_config(config)
    return text if any(text.get(name) for name in EXPERT_COUNTS) else None


@check
def check_expert_weights(settings: Settings) -> list[Problem]:
    """The trainer weighs a token's experts as the engines do, and as the model was made."""
    text = mixture(settings)
    if text is None or text.get("model_type") not in BY_MBRIDGE:
        return []
    kind = str(text["model_type"])
    sum_to_one = kind == "mixtral" or bool(text.get("norm_topk_prob", False))
    found = settings.flag(PRE_SOFTMAX, BY_MBRIDGE[kind])
    if found != sum_to_one:
        return []
    whose = "is set" if settings.get(PRE_SOFTMAX) is not None else f"is mbridge's choice for {kind}"
    differ = "sum to one in this model, and would not" if sum_to_one else "do not sum to one in this model, and would"
    reason = f"{whose}: the weights of a token's experts {differ} in the trainer"
    return [Problem(PRE_SOFTMAX, found, reason, f"Set +{PRE_SOFTMAX}={str(not sum_to_one).lower()}")]


@check
def check_expert_export(settings: Settings) -> list[Problem]:
    """mbridge gathers the experts' weights over the ranks that share them; else the first commit would fail."""
    sizes = trainer_sizes(settings)
    if sizes is None or mixture(settings) is None or gathers(sizes):
        return []
    needed = sizes.tensor if sizes.expert == 1 else 1
    layout = f"with tensor parallel size {sizes.tensor} and expert parallel size {sizes.expert}"
    way_out = f"Set {EXPERT_TENSOR}={needed}, or {VANILLA}=False"
    return [Problem(EXPERT_TENSOR, sizes.expert_tensors, f"is not gathered by mbridge {layout}", way_out)]


def gathers(sizes: ParallelSizes) -> bool:
    """Whether mbridge exports experts that are divided so: without expert parallelism it takes their tensor parallel
    group for the dense layers', and without tensor parallelism it takes each rank's for whole."""
    if sizes.expert == 1:
        return sizes.expert_tensors == sizes.tensor
    return sizes.tensor > 1 or sizes.expert_tensors == 1
