"""Facts of a config that several checks need: verl's optional roles, pools of devices, and parallel sizes.

Roles follow the rules of verl/trainer/ppo/utils.py; processes are counted as the host libraries count them.

Sources: megatron/core/parallel_state.py `initialize_model_parallel`, verl/utils/config.py
`validate_config`, verl/workers/rollout/{replica,llm_server}.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from seamless_verl.config.settings import Settings
from seamless_verl.resources.parallel import ParallelSizes, ReplicaSizes
from seamless_verl.resources.tags import ROLLOUT as ROLLOUT_TAG
from seamless_verl.resources.tags import TRAIN, Layout
from seamless_verl.runtime.supervisor import LOCAL, named_cluster


def pool_backend(backend: object, *, accelerator: bool) -> str:
    """What carries weights to devices that only generate: what is configured, unless it reaches none of them."""
    return ("nccl" if accelerator else "gloo") if backend in (None, "naive") else str(backend)


def needs_critic(settings: Settings) -> bool:
    enable = settings.get("critic.enable")
    return settings.get("algorithm.adv_estimator") == "gae" if enable is None else bool(enable)


def needs_reference(settings: Settings) -> bool:
    in_reward = settings.flag("algorithm.use_kl_in_reward")
    return in_reward or settings.flag("actor_rollout_ref.actor.use_kl_loss")


def trains_adapter(settings: Settings) -> bool:
    """Whether adapters train; the actor without them is then the reference (trainer_base.py, `ref_in_actor`)."""
    model = "actor_rollout_ref.model"
    rank = settings.get(f"{model}.lora.rank", 0) or settings.get(f"{model}.lora_rank", 0)
    return bool(rank) or settings.get(f"{model}.lora_adapter_path") is not None


def has_reward_model(settings: Settings) -> bool:
    legacy = settings.get("reward_model.enable")
    return bool(settings.get("reward.reward_model.enable", False) if legacy is None else legacy)


def has_reward_pool(settings: Settings) -> bool:
    """Whether the reward model has devices of its own; verl takes the older key, too."""
    older = settings.get("reward_model.enable_resource_pool")
    return settings.flag("reward.reward_model.enable_resource_pool") if older is None else bool(older)


def has_teacher(settings: Settings) -> bool:
    return settings.flag("distillation.enabled")


def uses_megatron(settings: Settings) -> bool:
    return settings.text("actor_rollout_ref.actor.strategy") == "megatron"


def has_standalone_rollout(settings: Settings) -> bool:
    """Whether generation has a pool of devices of its own."""
    if settings.mode != "seamless":
        return settings.mode == "separate_async"
    resources = settings.seamless.resources
    if resources is not None:
        return bool(resources.tagged(ROLLOUT_TAG, without=TRAIN))
    return seamless_layout(settings) is not Layout.COLOCATED


def has_hybrid_rollout(settings: Settings) -> bool:
    """Whether rollout engines share the trainer's devices; verl's separate_async may have both kinds."""
    if settings.mode == "separate_async":
        return settings.flag("actor_rollout_ref.hybrid_engine", True)
    return settings.mode != "seamless" or seamless_layout(settings).shares_devices


def by_tags(settings: Settings) -> bool:
    """Whether the run's machines are described by tags."""
    return settings.mode == "seamless" and settings.seamless.resources is not None


def seamless_layout(settings: Settings) -> Layout:
    nodes = settings.integer("actor_rollout_ref.rollout.nnodes", 0, least=0)
    per_node = settings.integer("actor_rollout_ref.rollout.n_gpus_per_node", 0, least=0)
    return settings.seamless.layout_for(nodes, per_node)


ADDRESS = "ray_kwargs.ray_init.address"


def joins_cluster(settings: Settings) -> bool:
    """Whether the run joins a named Ray cluster, perhaps on other machines."""
    return named_cluster(settings.get(ADDRESS)) not in ("", LOCAL)


def starts_cluster(settings: Settings) -> bool:
    """Whether the run starts a Ray cluster of its own, of this machine alone; else it joins one that runs here."""
    # As ray.init looks for it; one that may not be looked at is somebody else's.
    running = os.path.join(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    named = named_cluster(settings.get(ADDRESS))
    return named == LOCAL or (not named and not os.path.exists(running))


def brings_code(settings: Settings) -> bool:
    """Whether Ray gives the job's processes code that is not on the path of this process."""
    environment = settings.get("ray_kwargs.ray_init.runtime_env")
    if not isinstance(environment, Mapping):
        return False
    brings = any(environment.get(name) for name in ("working_dir", "py_modules", "pip", "conda", "uv"))
    return brings or "PYTHONPATH" in (environment.get("env_vars") or {})


MEGATRON = "actor_rollout_ref.actor.megatron"
VANILLA = f"{MEGATRON}.vanilla_mbridge"  # mbridge, and not Megatron-Bridge
ROLLOUT_KEY = "actor_rollout_ref.rollout"
ULYSSES = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


def trainer_world(settings: Settings) -> int:
    """Processes that train, one a device."""
    return settings.integer("trainer.nnodes") * settings.integer("trainer.n_gpus_per_node")


def trainer_sizes(settings: Settings) -> ParallelSizes | None:
    """None where those of the trainer's engine are not known."""
    if uses_megatron(settings):
        axes = ("tensor_model", "pipeline_model", "context", "expert_model")
        tensor, pipeline, context, expert = (settings.integer(f"{MEGATRON}.{axis}_parallel_size", 1) for axis in axes)
        expert_tensor = settings.integer(f"{MEGATRON}.expert_tensor_parallel_size", tensor)
        return ParallelSizes(tensor, pipeline, context, expert, expert_tensor)
    if settings.text("actor_rollout_ref.actor.strategy").startswith("fsdp"):
        return ParallelSizes(context=settings.integer(ULYSSES, 1), context_key=ULYSSES)
    return None


def data_parallel_size(settings: Settings) -> int | None:
    """Trainer ranks that see different sequences; None where their number is not known, or not whole."""
    world, sizes = trainer_world(settings), trainer_sizes(settings)
    return None if sizes is None or world % sizes.model else sizes.data(world)


def replica_sizes(settings: Settings) -> ReplicaSizes:
    """The sizes of a replica: of all its servers, where prefill and decode are apart (verl's rollout/llm_server.py)."""
    axes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    tensor, data, pipeline = (settings.integer(f"{ROLLOUT_KEY}.{axis}", 1) for axis in axes)
    apart = f"{ROLLOUT_KEY}.disaggregation"
    if settings.flag(f"{apart}.enabled"):
        decode = settings.integer(f"{apart}.decode_tensor_model_parallel_size", tensor)
        tensor *= settings.integer(f"{apart}.prefill_replicas", 1)
        tensor += decode * settings.integer(f"{apart}.decode_replicas", 1)
    return ReplicaSizes(tensor, data, pipeline)


def standalone_devices(settings: Settings) -> int:
    """Devices of the standalone rollout pool, 0 when the mode has none."""
    nodes = settings.integer(f"{ROLLOUT_KEY}.nnodes", 0, least=0)
    return nodes * settings.integer(f"{ROLLOUT_KEY}.n_gpus_per_node", 0, least=0)


ENGINE_KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"  # of vLLM; verl takes names with `_` and `-`


SPECULATIVE = "speculative_config"
OWN_DRAFTS = {
    "method": "custom_class",
    "model": "seamless_verl.replica.drafts.SuffixProposer",  # a test compares it
    "num_speculative_tokens": 16,
}
"""The `speculative_config` of engines with `seamless.drafts=suffix`; the proposer chooses how many of them."""


def engine_option(kwargs: Any, name: str) -> Any:
    """The value of the option `name`, written with `_`, in the node at ENGINE_KWARGS; None where it is not given."""
    options = kwargs.items() if isinstance(kwargs, Mapping) else ()
    return next((value for key, value in options if str(key).replace("-", "_") == name), None)


def engines_parser(settings: Settings) -> str | None:
    """The reasoning parser of the engines' own options, from either of its two places."""
    kwargs = settings.get(ENGINE_KWARGS)
    nodes = kwargs, engine_option(kwargs, "structured_outputs_config")
    return next((str(parser) for node in nodes if (parser := engine_option(node, "reasoning_parser"))), None)


def option_of(name: str, options: Sequence[str]) -> str | None:
    """The last value of an option of `vllm serve`, written behind `=` or as the next item."""
    value = None
    for option, following in zip_longest(options, options[1:]):
        if option.partition("=")[0].replace("_", "-") == name:
            value = option.partition("=")[2] if "=" in option else following
    return value
