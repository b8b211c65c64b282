"""What a plan says of a run besides its placement, a line each: of its weights, its routes and its updates.

The workers decide each of these of the model that is built; here it is foretold from the settings.
"""

from __future__ import annotations

from seamless_verl.config.model import MODEL, OUR_ENGINES, model_config, text_config
from seamless_verl.config.planning import ENGINE, longest_sequence, parallel_sizes
from seamless_verl.config.roles import MEGATRON, VANILLA, trains_adapter, uses_megatron
from seamless_verl.config.settings import Settings
from seamless_verl.resources.memory_fit import gigabytes
from seamless_verl.resources.model_facts import EXPERT_COUNTS
from seamless_verl.trajectory.routes import ONE_BYTE

MODEL_AXES = ("tensor_model", "pipeline_model", "expert_model", "expert_tensor")
ROUTES = f"{ENGINE}.enable_rollout_routing_replay"


def export_line(settings: Settings) -> str:
    """By which bridge Megatron's weights are exported, and whether the trainer waits for their staging, and why.

    `weights/background.py` decides it in the workers, of the model that is built. Nothing for other engines.
    """
    if settings.mode != "seamless" or not uses_megatron(settings):
        return ""
    bridge = "mbridge" if settings.flag(VANILLA) else "Megatron-Bridge"
    sizes = {f"{axis}_parallel_size": settings.integer(f"{MEGATRON}.{axis}_parallel_size", 1) for axis in MODEL_AXES}
    why = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    why += ["param_offload=True"] if settings.flag(f"{MEGATRON}.param_offload") else []
    config = model_config(settings, MODEL)
    text = {} if config is None else text_config(config)
    why += [f"{name}={text[name]}" for name in EXPERT_COUNTS if text.get(name)]
    waits = f"the trainer waits for it ({', '.join(why)})" if why else "the trainer goes on"
    return f"weights: exported by {bridge}; while they are staged, {waits}"


def routes_line(settings: Settings) -> str:
    """What the routes take that engines return and R3 replays: an id for each layer, also of those without experts,
    and chosen expert. Nothing of a run without them, or of a model that is not here."""
    config = model_config(settings, MODEL) if settings.mode == "seamless" and settings.flag(ROUTES) else None
    text = {} if config is None else text_config(config)
    experts = next((text[name] for name in EXPERT_COUNTS if text.get(name)), 0)
    layers, chosen = text.get("num_hidden_layers"), text.get("num_experts_per_tok")
    if not experts or not layers or not chosen:
        return ""
    row = layers * chosen * (1 if experts <= ONE_BYTE else 2)
    sessions = settings.integer("data.train_batch_size") * settings.integer(f"{ENGINE}.n", 1)
    step = gigabytes(sessions * longest_sequence(settings) * row)
    return f"routes: {row:,} bytes a token in journal and rows, up to {step} for a step's {sessions:,} sessions"


def shared_prefixes_line(settings: Settings) -> str:
    """Whether updates compute the prompt of a group's sequences once, as far as settings say; nothing of verl's own
    modes, and of groups of one."""
    samples = settings.integer(f"{ENGINE}.n", 1)
    if settings.mode != "seamless" or samples == 1:
        return ""
    if (against := shared_prefixes_obstacle(settings)) is not None:
        return f"updates: each sequence is computed alone ({against})"
    return f"updates: the prompt of a group's {samples} sequences is computed once (seamless.shared_prefixes=auto)"


def shared_prefixes_obstacle(settings: Settings) -> str | None:
    """What has each sequence computed alone; None where the workers may find nothing either.

    `platform/megatron/shared_prefixes.py` decides it there, of the model that is built.
    """
    config = model_config(settings, MODEL) or {}
    text, megatron = text_config(config), uses_megatron(settings)
    against = {
        "seamless.shared_prefixes=never": settings.seamless.shared_prefixes == "never",
        "an engine other than Megatron's": not megatron,
        "Transformer Engine's layers": megatron and settings.get(f"{MODEL}.external_lib") not in OUR_ENGINES,
        "context parallelism": parallel_sizes(settings).context > 1,
        "experts": any(text.get(name) for name in EXPERT_COUNTS),
        "adapters": trains_adapter(settings),
        "a model of images": "vision_config" in config,
        "multi-token prediction": settings.flag(f"{MODEL}.mtp.enable"),
        "padded batches": not settings.flag(f"{MEGATRON}.use_remove_padding", True),
        "fused kernels for the loss": settings.flag(f"{MODEL}.use_fused_kernels"),
    }
    return next((name for name, found in against.items() if found), None)
