"""Finds every mistake of a command line that hydra cannot compose: hydra stops at the first one.

The choices of configs (`model_engine=dp`) are composed first, with our own config in place of one that does not exist.
Then every other override is applied by itself, those
that follow a wrong one as if it were right, and the config that comes out is checked like one without mistakes. Keys of
another of verl's training engines are one mistake: the choice of the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict

from seamless_verl.config.composing import HERE, config_error
from seamless_verl.config.verl_keys import (
    DEFAULT_ENGINE,
    ENGINE,
    engine_config,
    engine_keys,
    engines,
    items_of,
    read_yaml,
)
from seamless_verl.config.words import grouped, misread_of
from seamless_verl.errors import ConfigError

STRATEGIES = tuple(f"{node}.strategy" for node in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"))
NODES = (".fsdp_config.", ".megatron.")  # the same settings of FSDP's and of Megatron's engine
MACHINES = ("seamless.resources", "seamless.layout", "seamless.cpu")
LISTED = 6  # keys in a message, at most
CONFIG_NAME = "--config-name"
ASYNCHRONOUS = "fully_async"  # begins the names of the configs of verl's experimental trainer
REPLACED = {  # its own keys, with what the `seamless` trainer has for them
    "async_training.staleness_threshold": "seamless.max_staleness, a number of versions",
    "async_training.trigger_parameter_sync_step": "trainer.v1.seamless.parameter_sync_step",
    "async_training.require_batches": "data.train_batch_size",
    "async_training.partial_rollout": "nothing: calls always continue over an update",
    "rollout.nnodes": "actor_rollout_ref.rollout.nnodes",
    "rollout.n_gpus_per_node": "actor_rollout_ref.rollout.n_gpus_per_node",
    "rollout.total_rollout_steps": "trainer.total_training_steps, which counts updates",
}
Compose = Callable[[Sequence[str]], DictConfig]
"""Composes a new config of options and choices, to be changed; ConfigError where hydra cannot."""
Inspect = Callable[[DictConfig, Sequence[str]], object]
"""Checks a config, given the overrides that it was made with; raises its mistakes as a ConfigError."""


def find_mistakes(arguments: Sequence[str], compose: Compose, inspect: Inspect) -> list[ConfigError]:
    """The mistakes of the arguments, and of the config that they make; none where it would be run."""
    given = get_args_parser().parse_args(list(arguments))
    options = [text for text in arguments if text not in given.overrides]
    readable, mistakes = _parse(given.overrides)
    chosen = [override.input_line or "" for override in readable if _is_choice(override)]
    config, options, kept, refused = _compose_most(options, chosen, compose)
    mistakes += refused
    if config is None:
        return mistakes
    values = [override for override in readable if not _is_choice(override)]
    found = _apply_all(values, config)
    current = str(config.get(ENGINE))
    choice = _choice_of(current, [str(given.config_name), *kept], values)
    engine = None if choice else _engine_of(found, values, current)
    if engine is None:
        _name_engines(found, current, choice)
    else:
        keys = found.keys_of(engine)
        mistakes.append(_wrong_engine(engine, config, sorted(keys)))
        if OmegaConf.select(config, "trainer.device") == "cpu":  # only Megatron trains there
            found.unknown = {key: one for key, one in found.unknown.items() if key not in keys}
        else:
            found = _apply_all(values, compose([*options, *kept, f"{ENGINE}={engine}"]))
    _name_replaced(found)
    mistakes += [*found.unknown.values(), *found.others]
    try:
        inspect(found.config, [*kept, *(override.input_line or "" for override in values)])
    except ConfigError as error:
        mistakes += error.mistakes
    return mistakes


def without_settings(config: DictConfig, wrong: Sequence[ConfigError]) -> DictConfig | None:
    """A config with the defaults of `seamless:` in place of wrong settings there, to find what else is wrong.

    None where another setting is wrong, too, or one on which the machines depend: all sizes follow from these.
    """
    rest = copy.deepcopy(config)
    for mistake in wrong:
        node, _, name = mistake.key.rpartition(".")
        inner = OmegaConf.select(rest, node) if node.startswith("seamless") else None
        if not isinstance(inner, DictConfig) or mistake.key.startswith(MACHINES):
            return None
        with open_dict(inner):
            if name in list(inner.keys()):  # `in` and `pop` would resolve an interpolation, which may be what is wrong
                del inner[name]
    return rest


def beside(wrong: Sequence[ConfigError], others: Sequence[ConfigError]) -> list[ConfigError]:
    """Those of the other mistakes that are outside of the `seamless:` node and do not follow from the wrong ones."""
    keys = [mistake.key for mistake in wrong]
    return [one for one in others if not one.key.startswith("seamless.") and not any(key in str(one) for key in keys)]


def only_composes(arguments: Sequence[str]) -> bool:
    """Whether hydra is asked for one run of the job, and for nothing else."""
    given = get_args_parser().parse_args(list(arguments))
    return not (given.multirun or given.cfg or given.info or given.hydra_help or given.help)


@dataclass
class _Applied:
    """A config with the overrides that it takes, and the mistakes: of keys that it lacks, and others."""

    config: DictConfig
    unknown: dict[str, ConfigError] = field(default_factory=dict)
    others: list[ConfigError] = field(default_factory=list)

    def keys_of(self, engine: str) -> set[str]:
        """Those of the unknown keys that another engine has."""
        return set(self.unknown) & engine_keys(engine)


def _parse(overrides: Sequence[str]) -> tuple[list[Override], list[ConfigError]]:
    parser, readable, mistakes = OverridesParser.create(), list[Override](), list[ConfigError]()
    for group in grouped(overrides):
        whole = misread_of(group[0], group) if len(group) > 1 else None
        if whole is not None:
            mistakes.append(whole)
            continue
        try:
            readable += parser.parse_overrides(group)
        except OverrideParseException as error:
            mistakes.append(config_error(error, overrides))
    return readable, mistakes


def _is_choice(override: Override) -> bool:
    """Whether hydra must have it when it composes: a config of a group, a setting of hydra's own, or a sweep."""
    key = override.key_or_group
    return "." not in key or override.package is not None or key.startswith("hydra") or override.is_sweep_override()


def _compose_most(
    options: list[str], chosen: list[str], compose: Compose
) -> tuple[DictConfig | None, list[str], list[str], list[ConfigError]]:
    """The config of those options and choices that can be composed, these, and the mistakes of the others."""
    kept, mistakes = list(chosen), list[ConfigError]()
    while True:
        try:
            return compose([*options, *kept]), options, kept, mistakes
        except ConfigError as error:
            if error.key == CONFIG_NAME:
                mistakes.append(_other_trainer(error) if str(error.value).startswith(ASYNCHRONOUS) else error)
                wrong, options = options, []
            else:
                mistakes.append(error)
                wrong = [text for text in kept if error.key in (_key(text), _key(text).partition("@")[0])]
                kept = [text for text in kept if text not in wrong[-1:]]
            if not wrong:
                return None, options, kept, mistakes


def _other_trainer(error: ConfigError) -> ConfigError:
    reason = "is the config of another of verl's programs, its experimental asynchronous trainer"
    way_out = (
        "Leave --config-name and --config-path out: the seamless trainer is asynchronous, within seamless.max_staleness"
    )
    return ConfigError(CONFIG_NAME, error.value, reason, way_out)


def _apply_all(values: Iterable[Override], config: DictConfig) -> _Applied:
    done, added = _Applied(config), set[str]()
    for override in values:
        key, text = override.key_or_group, override.input_line or ""
        try:
            ConfigLoaderImpl._apply_overrides_to_config([override], config)
        except HydraException as error:
            mistake = config_error(error, [text])
            if override.is_add():
                OmegaConf.update(config, key, override.value(), merge=True, force_add=True)
                if key in added:
                    mistake = ConfigError(key, mistake.value, "is added more than once", f"Write {text} once")
            if override.is_add() or override.is_delete() or OmegaConf.select(config, key) is not None:
                done.others.append(mistake)
            else:
                done.unknown[key] = mistake
        if override.is_add() or override.is_force_add():
            added.add(key)
    return done


def _choice_of(current: str, choices: Sequence[str], values: Sequence[Override]) -> str:
    """What on the command line chooses the engine: its group, a strategy, or verl's config of it; "" for nothing."""
    name, *groups = choices
    chosen = [text for text in groups if _key(text).partition("@")[0] in (ENGINE, "actor", "ref", "critic")]
    strategies = (one.key_or_group for one in values if one.key_or_group in STRATEGIES and one.value() == current)
    chosen += [f"{key}={current}" for key in strategies]
    chosen += [f"{CONFIG_NAME}={name}"] if f"_{current}_" in name else []
    return next(iter(chosen), "")


def _engine_of(found: _Applied, values: Sequence[Override], current: str) -> str | None:
    """The engine that has most of the unknown keys, and more of the given ones than the current engine has alone."""
    counts = {engine: len(found.keys_of(engine)) for engine in engines() if engine != current}
    best = max(counts, key=lambda engine: counts[engine], default=None)
    if best is None:
        return None
    own = {one.key_or_group for one in values} & (engine_keys(current) - engine_keys(best))
    return best if counts[best] > len(own) else None


def _wrong_engine(engine: str, config: DictConfig, keys: Sequence[str]) -> ConfigError:
    more = f" and {len(keys) - LISTED} more" if len(keys) > LISTED else ""
    default = ", verl's default engine" if engine == DEFAULT_ENGINE else ""
    reason = f"has none of these keys, which {ENGINE}={engine} has{default}: {', '.join(keys[:LISTED])}{more}"
    way_out = f"Add {ENGINE}={engine}"
    if OmegaConf.select(config, "trainer.device") == "cpu":
        way_out += " on machines with accelerators (checked anywhere with `--platform accelerator`). On the CPU "
        way_out += "platform, which trains with Megatron only, leave these keys out"
    return ConfigError(ENGINE, config.get(ENGINE), reason, way_out)


def _name_engines(found: _Applied, current: str, choice: str) -> None:
    """Say of each unknown key which other engine has it; `choice` chose the current one, if it is not empty."""
    for key, mistake in found.unknown.items():
        others = [engine for engine in engines() if key in engine_keys(engine)]
        if others:
            says = "" if choice in ("", f"{ENGINE}={current}") else f", as {choice} says"
            fsdp = ", verl's FSDP" if others[0] == DEFAULT_ENGINE else ""
            reason = f"is a key of {ENGINE}={others[0]}{fsdp}, and the engine is {current}{says}"
            other = "" if choice and current != DEFAULT_ENGINE else f"{ENGINE}={others[0]}"
            instead = _own_key(key, current) or other
            way_out = f"Leave it out{f', or write {instead}' if instead else ''}"
            found.unknown[key] = ConfigError(key, mistake.value, reason, way_out)


def _own_key(key: str, engine: str) -> str | None:
    """The key with which that engine sets what another one's key does; None where it has none."""
    names = (key.replace(one, other) for one in NODES for other in NODES if one in key)
    return next((name for name in names if name != key and name in engine_keys(engine)), None)


def _name_replaced(found: _Applied) -> None:
    """Say of each key of verl's experimental asynchronous trainer what replaces it."""
    for key in found.unknown.keys() & REPLACED.keys():
        value, reason = found.unknown[key].value, "is a key of verl's experimental asynchronous trainer"
        found.unknown[key] = ConfigError(key, value, reason, f"The seamless trainer has {REPLACED[key]}")


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def own_keys() -> frozenset[str]:
    """Keys that only this package's platform files set: verl lacks them, or has no value there."""
    verls = dict(items_of(engine_config("megatron")))
    files = (HERE / "platform").glob("*.yaml")
    ours = (key for file in files for key, value in items_of(read_yaml(file)) if not isinstance(value, Mapping))
    return frozenset(key for key in ours if verls.get(key) is None)


def with_own_keys(arguments: Sequence[str]) -> list[str]:
    """The arguments with `++key` for the first `+key` of each key that only our platform files set.

    verl takes such an override, and hydra would refuse it because of our file.
    """
    if not any(text.startswith("+") for text in arguments):
        return list(arguments)
    ours, changed = own_keys(), []
    for text in arguments:
        key = _key(text)
        if text.startswith("+") and not text.startswith("++") and key in ours:
            ours -= {key}
            text = f"+{text}"
        changed.append(text)
    return changed
