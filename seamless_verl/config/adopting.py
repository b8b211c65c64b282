"""Sets verl's own fields from the `seamless:` node, so that verl's code and ours read the same values.

A value that the user set stays; the checks refuse it when it contradicts the tags. A value counts as set when the
command line names it, or when it is not the default.
"""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from seamless_verl.config import engine_kwargs
from seamless_verl.config.correcting import adopt_correction
from seamless_verl.config.joining import adopt_cluster
from seamless_verl.config.planning import HANDOVER, choose_handover, replica_sizes, roles_of
from seamless_verl.config.roles import by_tags
from seamless_verl.config.schema import Handover
from seamless_verl.config.settings import Settings
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
ADOPTED = ("reasoning-parser", "reasoning-parser-plugin")
CPU_DEFAULTS = VERL_DEFAULTS | {f"trainer.{PER_NODE}": 1}  # config/platform/cpu.yaml


def adopt(config: DictConfig, overrides: Sequence[str] = ()) -> str | None:
    """Set what follows from the settings, as for a run; in words which loss was chosen, None where none was.

    Raises:
        ConfigError: settings that something follows from cannot be read.
    """
    adopt_cluster(config, overrides)
    adopt_resources(config, overrides)
    adopt_parsers(config)
    return adopt_correction(config, overrides)


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
    named = {text.lstrip("+").partition("=")[0] for text in overrides}
    defaults = CPU_DEFAULTS if cpu else VERL_DEFAULTS
    fields = verl_fields(resources, replica=replica_sizes(settings).size, needed=roles_of(settings).tags)
    for key, value in fields.items():
        if key not in named and _is_default(config, settings, key, defaults):
            OmegaConf.update(config, key, value, force_add=True)


def adopt_parsers(config: DictConfig) -> None:
    """Give the engines the gateway's reasoning parser: they start a grammar where reasoning ends."""
    settings = Settings.of(config, devices=None, accelerator=True)
    gateway, given = settings.seamless.gateway, engine_kwargs.engines_parser(settings)
    for name in ADOPTED if gateway.enabled and given is None else ():
        if (chosen := engine_kwargs.option_of(f"--{name}", gateway.options)) is not None:
            OmegaConf.update(config, f"{engine_kwargs.KEY}.{name.replace('-', '_')}", chosen, force_add=True)


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
