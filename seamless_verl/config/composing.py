"""Hydra composes the config: where it finds verl's files and ours, its errors as ConfigErrors, its run folder.

`pkg://verl.trainer.config` would import verl, and with it torch, before a typing mistake could be reported; so
hydra gets the directory. A search-path plugin works with every feature of hydra, and a user's own `--config-path`
may name `ppo_trainer` or `seamless_ppo_trainer` in its defaults.

Hydra ends with code 1 and its own message for a mistake in an override. Here such a mistake becomes a ConfigError,
as every other one: key, value, reason and way out. The folder that hydra makes for a refused run is removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher, get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException, SearchPathException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from seamless_verl.config.words import GROUPS, misread_of
from seamless_verl.errors import ConfigError
from seamless_verl.runtime.fields import nearest

HERE = Path(__file__).parent


def verl_config_dir() -> Path:
    """verl/trainer/config of the installed verl; ConfigError when there is no verl."""
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl", None, "verl is not installed", "Install verl==0.9.1")
    return Path(next(iter(spec.submodule_search_locations)), "trainer", "config")


class TrainerConfigs(SearchPathPlugin):  # type: ignore[misc]
    """Adds the two directories after those of the command line."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl", path=f"file://{verl_config_dir()}")
        search_path.append(provider="seamless_verl", path=f"file://{HERE}")


def register_search_path() -> None:
    """Register both directories with hydra, before `hydra.main` or `hydra.initialize`; more than once does no harm."""
    plugins = Plugins.instance()
    if TrainerConfigs not in plugins.discover(SearchPathPlugin):
        plugins.register(TrainerConfigs)


def named_platform(option: str, name: str) -> str:
    """The platform that an option names; ConfigError where there is none of that name."""
    names = sorted(file.stem for file in (HERE / "platform").glob("*.yaml"))
    if name not in names:
        raise ConfigError(option, name, "is not a platform", nearest(name, names))
    return name


FULL_ERROR = "HYDRA_FULL_ERROR"  # hydra then raises what it would otherwise print
LISTS = ["seamless.gateway.options"]  # their values have characters that hydra cannot parse without quotes
SUGGESTIONS = 3  # for a mistyped key, at most
LEAST_LIKENESS, LIKENESS_RANGE = 1.4, 0.15  # of 2: of any suggestion, and how far below the best one
HYDRA_FILES = {"config.yaml", "hydra.yaml", "overrides.yaml"}  # in .hydra
BY_DATE = re.compile(r"\d{4}-\d\d-\d\d")  # hydra's run folders are in outputs/<date>, by default


@contextmanager
def composing(arguments: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Raise hydra's errors as ConfigErrors while it composes; the job calls what is yielded when it begins.

    Errors after that are the job's own, and hydra reports them as usual.
    """
    before, composed = os.environ.get(FULL_ERROR), False

    def begin() -> None:
        nonlocal composed
        composed = True
        if before is None:
            os.environ.pop(FULL_ERROR, None)
        else:
            os.environ[FULL_ERROR] = before

    os.environ[FULL_ERROR] = "1"
    try:
        yield begin
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        if composed:
            raise
        raise config_error(error, arguments) from error
    except OSError as error:
        if composed or error.filename is None or str(error.filename).endswith(".yaml"):  # a config that cannot be read
            raise
        way_out = "Set hydra.run.dir to a folder of yours"
        raise ConfigError("hydra.run.dir", str(error.filename), f"cannot be made: {error.strerror}", way_out) from error
    finally:
        begin()


def config_error(error: Exception, arguments: Sequence[str]) -> ConfigError:
    """The ConfigError for what hydra, omegaconf or the YAML parser refused, with the override that caused it."""
    text, cause = str(error) or str(error.__cause__), error.__cause__
    if isinstance(error, MissingConfigException):
        return _missing_config(error)
    if isinstance(error, SearchPathException):
        folder = (re.findall(r"'(.+?)'", text) or [None])[0]
        return ConfigError("--config-dir", folder, "there is no such folder", "Name the folder that holds the config")
    if isinstance(error, OverrideParseException):
        if (mistake := misread_of(error.override, arguments)) is not None:
            return mistake
        key, value = _split(error.override)
        quoted = _quoted(key, value or "")
        way_out = f"Quote special characters: '{key}={quoted}'"
        return ConfigError(key, value, f"cannot be read ({_first(text)})", way_out)
    override = _named_override(text, arguments)
    if override is None:
        way_out = "Correct the config, or the override that the message is about"
        return ConfigError("config", None, f"hydra cannot compose it: {_both(text, cause)}", way_out)
    key, value = _split(override)
    if override.startswith("~") and "does not exist" in text:
        return ConfigError(key, value, "cannot be deleted: it does not exist", f"Leave {override} out")
    if "appears more than once" in text or "An item is already" in text or "Multiple values for" in text:
        return ConfigError(key, value, "exists already, and + only adds", f"Write {override.lstrip('+')}")
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) or "Could not override" in text:
        return ConfigError(key, value, "is not a known key", _near_keys(key, override, cause))
    return ConfigError(
        key, value, f"hydra refuses it: {_both(text, cause)}", f"Write {key}=<value> as hydra accepts it"
    )


def _quoted(key: str, value: str) -> str:
    """How the value is written for hydra: a list of texts, or a text."""
    if value.startswith("["):
        return '["...","..."]'
    text = '"..."' if set(value) & set("\"'") else f'"{value}"'
    return f"[{text}]" if key in LISTS else text


def _missing_config(error: MissingConfigException) -> ConfigError:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    reason, options = _first(str(error)), list(error.options or [])
    if not group:
        way_out = "Name a config (without .yaml) of the folder that --config-dir gives, or give that folder"
        return ConfigError("--config-name", name or None, "there is no such config", way_out)
    way_out = nearest(name, options) if options else f"Name a config of the group {group}"
    return ConfigError(group, name, f"there is no such config ({reason})", way_out)


def _named_override(text: str, arguments: Sequence[str]) -> str | None:
    """The override that a message names: the longest one, by its key between quotes or as the message's subject."""
    # only a deletion has no value; another word is that of an option, such as a config's name
    overrides = [
        arg for arg in arguments if re.match(r"[+~]*[\w@./:-]+=|~[\w@./:-]+$", arg) and not arg.startswith("-")
    ]
    named = [arg for arg in overrides if re.search(rf"(?<![\w.]){re.escape(_split(arg)[0])}(?![\w.])", text)]
    return max(named, key=lambda arg: len(_split(arg)[0]), default=None)


def _split(override: str) -> tuple[str, str | None]:
    key, given, value = override.lstrip("+~").partition("=")
    return key, value if given else None


def _near_keys(key: str, override: str, cause: BaseException | None) -> str:
    """The nearest keys of the config in which the key was not found, and how a new one is added."""
    node = getattr(cause, "parent_node", None)
    root = node._get_root() if isinstance(node, DictConfig) else None
    known = list(dict.fromkeys(GROUPS + ([] if root is None else list(_keys(OmegaConf.to_container(root), "")))))
    likeness = {other: _likeness(key, other) for other in get_close_matches(key, known, n=2 * SUGGESTIONS, cutoff=0.75)}
    least = max([LEAST_LIKENESS, *(value - LIKENESS_RANGE for value in likeness.values())])
    near = sorted((other for other in likeness if likeness[other] >= least), key=lambda other: -likeness[other])
    # For a user who knows the last part of the key but not its node.
    last = key.rpartition(".")[2]
    near += [other for other in known if other.rpartition(".")[2] == last and other not in near]
    hint = f"Did you mean {' or '.join(near[:SUGGESTIONS])}? " if near else ""
    if key.startswith("seamless."):  # a node that takes no new keys
        ours = (other for other in known if other.startswith("seamless."))
        return hint.rstrip() or f"Valid: {', '.join(ours)}"
    if root is not None and _takes_no_new_keys(root, key):
        return f"{hint}Leave it out: verl takes no other keys there"
    return f"{hint}A new key is added as +{override.lstrip('+')}"


def _takes_no_new_keys(root: Any, key: str) -> bool:
    """Whether the node of a key becomes a dataclass of verl's, which refuses keys that it does not have."""
    parent = key.rpartition(".")[0]
    while parent and (node := OmegaConf.select(root, parent)) is None:
        parent = parent.rpartition(".")[0]
    return bool(parent) and isinstance(node, DictConfig) and "_target_" in node


def _likeness(key: str, other: str) -> float:
    """Of the whole keys, and again of their last parts, where most typing mistakes are; 2 is equal."""
    last = SequenceMatcher(None, key.rpartition(".")[2], other.rpartition(".")[2])
    return SequenceMatcher(None, key, other).ratio() + last.ratio()


def _keys(node: Any, prefix: str) -> Iterator[str]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            if name == "hydra" and not prefix:
                continue
            key = f"{prefix}.{name}".lstrip(".")
            yield key
            yield from _keys(value, key)


def _first(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def _both(text: str, cause: BaseException | None) -> str:
    lines = [_first(text), _first(str(cause or ""))]
    return ": ".join(line.rstrip(".") for line in dict.fromkeys(lines) if line)


def remove_run_folder(folder: Path) -> None:
    """Remove hydra's folder of a refused run, when it has only the files that hydra itself just made.

    A log with text in it, or a file of another kind, keeps the whole folder.
    """
    own = folder / ".hydra"
    entries = set(folder.iterdir()) - {own}
    logs = {file for file in entries if file.suffix == ".log" and file.is_file() and not file.stat().st_size}
    settings = set(own.iterdir()) if own.is_dir() else set()
    if entries != logs or not {file.name for file in settings} <= HYDRA_FILES:
        return
    for file in (*logs, *settings):
        file.unlink()
    parents = [folder.parent, folder.parent.parent] if BY_DATE.fullmatch(folder.parent.name) else []
    for empty in (own, folder, *parents):
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()
