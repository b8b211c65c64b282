"""Sets verl's own fields from the `seamless:` node, so that verl's code and ours read the same values.

A value that the user set stays; the checks refuse it when it contradicts another. A value counts as set when the
command line names it, or when it is not the default.
"""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf, open_dict

from seamless_verl.config.checks.corrections import CORRECTION, IGNORED_BY_BYPASS, corrects, masks
from seamless_verl.config.checks.hosts import OF_THE_CLUSTER, RAY_INIT
from seamless_verl.config.checks.model import LOAD_FORMAT, lacks_base_weights
from seamless_verl.config.planning import HANDOVER, choose_handover, roles_of
from seamless_verl.config.roles import (
    ENGINE_KWARGS,
    OWN_DRAFTS,
    SPECULATIVE,
    by_tags,
    engine_option,
    engines_parser,
    joins_cluster,
    option_of,
    replica_sizes,
)
from seamless_verl.config.schema import CORRECTED_STALENESS, HARMLESS_STALENESS, Handover
from seamless_verl.config.settings import Settings
from seamless_verl.config.verl_keys import LOSS_MODE
from seamless_verl.resources.placement import NODES, PER_NODE, REWARD_NODE, ROLLOUT_NODE, TEACHER_NODE, verl_fields

# Of verl 0.9.1 (trainer/config), except those that interpolate another key; a unit test compares them.
VERL_DEFAULTS: dict[str, object] = {
    f"trainer.{NODES}": 1,
    f"trainer.{PER_NODE}": 8,
    f"{ROLLOUT_NODE}.{NODES}": 0,
    f"{REWARD_NODE}.enable_resource_pool": False,
    f"{REWARD_NODE}.{NODES}": 0,
    f"{REWARD_NODE}.{PER_NODE}": 8,
    f"{TEACHER_NODE}.{NODES}": 0,
    f"{TEACHER_NODE}.{PER_NODE}": 8,
}
FROM_FILES = "safetensors"
ADOPTED = ("reasoning-parser", "reasoning-parser-plugin")
CPU_DEFAULTS = VERL_DEFAULTS | {f"trainer.{PER_NODE}": 1}  # config/platform/cpu.yaml


def adopt(config: DictConfig, overrides: Sequence[str] = ()) -> str | None:
    """Set what follows from the settings, as for a run; a line for each choice in it, None where there was none.

    Raises:
        ConfigError: settings that something follows from cannot be read.
    """
    adopt_engine(config, overrides)
    adopt_cluster(config, overrides)
    adopt_resources(config, overrides)
    adopt_parsers(config)
    adopt_drafts(config)
    chosen = adopt_base_weights(config, overrides), adopt_correction(config, overrides)
    return "\n".join(filter(None, chosen)) or None


def keys_of(overrides: Sequence[str]) -> set[str]:
    """The keys that a command line sets."""
    return {text.lstrip("+").partition("=")[0] for text in overrides}


PARTS = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
MEGATRON_KEYS = ("vanilla_mbridge", "override_transformer_config")  # of config/platform/cpu.yaml, compared by a test


def adopt_engine(config: DictConfig, overrides: Sequence[str] = ()) -> None:
    """Take back what the platform's file has set for Megatron, where another engine trains: verl's classes of that
    engine's settings refuse the key `megatron`. What the user set stays, for them to refuse."""
    named = [f"{key}." for key in keys_of(overrides)]
    for part in PARTS:
        node = OmegaConf.select(config, part)
        if isinstance(node, DictConfig) and "Mcore" not in str(node.get("_target_")):
            _take_back_megatron(node, f"{part}.megatron.", named)


def _take_back_megatron(node: DictConfig, within: str, named: Sequence[str]) -> None:
    """`within` and the keys that are `named` end in a point."""
    inner = node.get("megatron")
    if not isinstance(inner, DictConfig) or within in named:
        return
    with open_dict(node):
        for key in MEGATRON_KEYS:
            if not any(name.startswith(f"{within}{key}.") for name in named):
                inner.pop(key, None)
        if not inner:
            node.pop("megatron")


COMMAND = f"{RAY_INIT}.runtime_env.py_executable"
PIN_VARIABLE = f"{RAY_INIT}.runtime_env.env_vars.SEAMLESS_CPU_PIN"  # as platform/cores.py names it


def adopt_cluster(config: DictConfig, overrides: Sequence[str] = ()) -> None:
    """Take back what the CPU platform has set for a cluster of the run's own, if the run joins one.

    `overrides` are the command line's: what they name stays. Workers of a cluster are started anew, and pinned to no
    core: which cores a node has, only the node knows.
    """
    cpu = OmegaConf.select(config, "trainer.device") == "cpu"
    settings = Settings.of(config, devices=None, accelerator=not cpu)
    if not cpu or not joins_cluster(settings):
        return
    named = keys_of(overrides)
    for key in (*(f"{RAY_INIT}.{name}" for name in OF_THE_CLUSTER), COMMAND):
        if key not in named and settings.get(key) is not None:
            OmegaConf.update(config, key, None, force_add=True)
    if PIN_VARIABLE not in named:
        OmegaConf.update(config, PIN_VARIABLE, "0", force_add=True)


def adopt_resources(config: DictConfig, overrides: Sequence[str] = ()) -> None:
    """Set verl's fields in `config` from its tags; `overrides` are the command line's. Without tags nothing changes.

    Raises:
        ConfigError: the tags, or a size they are combined with, cannot be read.
    """
    cpu = OmegaConf.select(config, "trainer.device") == "cpu"
    settings = Settings.of(config, devices=None, accelerator=not cpu)
    resources = settings.seamless.resources
    if resources is None or not by_tags(settings):
        return
    named = keys_of(overrides)
    defaults = CPU_DEFAULTS if cpu else VERL_DEFAULTS
    fields = verl_fields(resources, replica=replica_sizes(settings).size, needed=roles_of(settings).tags)
    for key, value in fields.items():
        if key not in named and _is_default(config, settings, key, defaults):
            OmegaConf.update(config, key, value, force_add=True)


def adopt_parsers(config: DictConfig) -> None:
    """Give the engines the gateway's reasoning parser: they start a grammar where reasoning ends."""
    settings = Settings.of(config, devices=None, accelerator=True)
    gateway, given = settings.seamless.gateway, engines_parser(settings)
    for name in ADOPTED if gateway.enabled and given is None else ():
        if (chosen := option_of(f"--{name}", gateway.options)) is not None:
            OmegaConf.update(config, f"{ENGINE_KWARGS}.{name.replace('-', '_')}", chosen, force_add=True)


def adopt_drafts(config: DictConfig) -> None:
    """Give the engines our proposer of drafts, where it is asked for and verl's fields name none."""
    settings = Settings.of(config, devices=None, accelerator=True)
    given = engine_option(settings.get(ENGINE_KWARGS), SPECULATIVE)
    if settings.mode == "seamless" and settings.seamless.drafts != "off" and given is None:
        OmegaConf.update(config, f"{ENGINE_KWARGS}.{SPECULATIVE}", OWN_DRAFTS, force_add=True)


def adopt_base_weights(config: DictConfig, overrides: Sequence[str] = ()) -> str | None:
    """Let engines read the model's own weights from its files where they are sent an adapter alone; in words, or None.

    What the command line names stays: check_adapter refuses random weights that were asked for.
    """
    settings = Settings.of(config, devices=None, accelerator=True)
    if LOAD_FORMAT in keys_of(overrides) or not lacks_base_weights(settings):
        return None
    OmegaConf.update(config, LOAD_FORMAT, FROM_FILES, force_add=True)
    return f"chosen: {LOAD_FORMAT}={FROM_FILES}, since engines are sent the adapter alone (docs/layouts.md)"


def adopt_handover(config: DictConfig) -> str | None:
    """Set what `seamless.handover=auto` comes to, so that every process of the run has the same; returns it and why.

    None where it is not `auto`, or another trainer runs. The config has passed the checks.
    """
    settings = Settings.of(config, devices=None, accelerator=OmegaConf.select(config, "trainer.device") != "cpu")
    if settings.mode != "seamless" or settings.seamless.handover is not Handover.AUTO:
        return None
    chosen = choose_handover(settings)
    OmegaConf.update(config, HANDOVER, chosen.handover.value, force_add=True)
    return str(chosen)


def _is_default(config: DictConfig, settings: Settings, key: str, defaults: dict[str, object]) -> bool:
    node, _, name = key.rpartition(".")
    parent = OmegaConf.select(config, node)
    if isinstance(parent, DictConfig) and name in parent and OmegaConf.is_interpolation(parent, name):
        return True
    return bool(settings.get(key, defaults.get(key)) == defaults.get(key))


# What `seamless.correction.loss=auto` and `seamless.max_staleness=null` come to, as tools/compare/rewards.md measured:
# with DPPO's loss tokens of four versions learn as those of none do, and without a correction one version is already
# behind. So `auto` is `dppo` wherever a run leaves verl's loss as it is, and a run that brings a loss of its own keeps
# it, with a bound that does little harm.
ACTOR = "actor_rollout_ref.actor"
BYPASS = f"{CORRECTION}.bypass_mode"
DPPO: dict[str, tuple[object, object]] = {
    LOSS_MODE: ("vanilla", "dppo_tv"),
    f"{ACTOR}.clip_ratio": (0.2, 0.15),
    f"{ACTOR}.clip_ratio_low": (0.2, 0.15),
    f"{ACTOR}.clip_ratio_high": (0.2, 0.15),
    f"{ACTOR}.clip_ratio_c": (3.0, 10_000.0),
    BYPASS: (False, True),
}
"""verl's default of each field, and what `seamless.correction.loss=dppo` sets (arXiv 2602.04879). The clips are of
probabilities. verl cuts a ratio off at `clip_ratio_c`: at 10,000 in effect never."""
CLIPS = tuple(key for key in DPPO if ".clip_ratio" in key)
LOSS, STALENESS, POLICY = "seamless.correction.loss", "seamless.max_staleness", "seamless.tokens.policy"
NAMED = 2  # keys in a message, at most


def adopt_correction(config: DictConfig, overrides: Sequence[str] = ()) -> str | None:
    """Set verl's fields for the loss, and the bound; what the user set stays. Other trainers read neither.

    Returns in words what was chosen; None where the user chose both, or another trainer runs.
    """
    settings = Settings.of(config, devices=None, accelerator=True)
    if settings.mode != "seamless":
        return None
    named = keys_of(overrides)
    asked = settings.seamless.correction.loss
    own = _own_loss(settings, named)
    keeps = bool(own) or settings.seamless.max_staleness == 0
    loss = asked if asked != "auto" else (None if keeps else "dppo")
    OmegaConf.update(config, LOSS, loss, force_add=True)
    for key, (default, value) in DPPO.items() if loss else ():
        if key not in named and settings.get(key, default) == default:
            OmegaConf.update(config, key, value, force_add=True)
    bound = settings.seamless.max_staleness
    if bound is None:
        corrected = corrects(Settings.of(config, devices=None, accelerator=True))
        bound = CORRECTED_STALENESS if corrected else HARMLESS_STALENESS
        OmegaConf.update(config, STALENESS, bound, force_add=True)
    why = f"which sets {LOSS_MODE}, its clips and {BYPASS}" if loss else _why_none(settings, own)
    chosen = [f"{LOSS}={loss or 'null'}, {why}"] if asked == "auto" else []
    chosen += [f"{STALENESS}={bound}"] if settings.seamless.max_staleness is None else []
    return f"chosen: {'; '.join(chosen)} (docs/algorithms.md)" if chosen else None


def _why_none(settings: Settings, own: Sequence[str]) -> str:
    """Which settings decide that a run keeps verl's loss as it is, with their values: two of them, at most."""
    if settings.seamless.max_staleness == 0:
        return f"since {STALENESS}=0 trains nothing old"
    texts = [f"{key}={settings.get(key)}" for key in own[:NAMED]]
    more = f" and {len(own) - NAMED} more" if len(own) > NAMED else ""
    why = f"since {', '.join(texts)}{more} {'is' if len(own) == 1 else 'are'} set"
    return f"{why} ({LOSS}=dppo asks for DPPO's all the same)" if set(own) <= {*CLIPS, POLICY} else why


def _own_loss(settings: Settings, named: set[str]) -> list[str]:
    """The keys by which a run says itself how old tokens are trained: the loss, its clips, which are of ratios for PPO,
    a correction, a mask, or a teacher."""
    defaults: dict[str, object] = {key: default for key, (default, _) in DPPO.items() if key != BYPASS}
    defaults |= {f"{CORRECTION}.{name}": value for name, value in IGNORED_BY_BYPASS.items()}
    own = [key for key, value in defaults.items() if key in named or settings.get(key, value) != value]
    own += [BYPASS] if BYPASS in named and not settings.flag(BYPASS) else []  # true is DPPO's own way
    own += [POLICY] if masks(settings) else []
    return own + (["distillation.enabled"] if settings.flag("distillation.enabled") else [])
