"""Where hydra finds verl's configs and ours, without importing verl.

`pkg://verl.trainer.config` would import verl, and with it torch, before a typing mistake could be
reported; the directory is enough. A search-path plugin reaches every hydra feature and lets a
user's own `--config-path` name either `ppo_trainer` or `seamless_ppo_trainer` in its defaults.

Hydra's command line: its refusals in our terms, and the folder that a refused run leaves.

Hydra ends with code 1 and words of its own for a mistake in an override. Here such a mistake becomes a
ConfigError, as every other one: the key, the value, and the way out.
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

from seamless_verl.config.schema import nearest
from seamless_verl.errors import ConfigError

HERE = Path(__file__).parent


def verl_config_dir() -> Path:
    """verl/trainer/config of the installed verl; ConfigError when there is no verl."""
    spec = find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl", None, "verl is not installed", "Install verl==0.9.1")
    return Path(next(iter(spec.submodule_search_locations)), "trainer", "config")


class TrainerConfigs(SearchPathPlugin):  # type: ignore[misc]
    """Adds the two directories behind whatever the command line asked for."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="verl", path=f"file://{verl_config_dir()}")
        search_path.append(provider="seamless_verl", path=f"file://{HERE}")


def register_search_path() -> None:
    """Tell hydra of both directories, before `hydra.main` or `hydra.initialize` runs; once is enough."""
    plugins = Plugins.instance()
    if TrainerConfigs not in plugins.discover(SearchPathPlugin):
        plugins.register(TrainerConfigs)


FULL_ERROR = "HYDRA_FULL_ERROR"  # hydra then raises what it would otherwise print
GROUPS = ["platform", "model_engine"]  # what can be chosen although it is no key
LISTS = ["seamless.gateway.options"]  # keys whose values have signs in them that hydra cannot read
NEAR = 3  # suggestions for a mistyped key, at most
LIKE, ABOUT = 1.4, 0.15  # of 2: how like a suggestion must be, and how much less so than the best
HYDRAS = {"config.yaml", "hydra.yaml", "overrides.yaml"}  # in .hydra
BY_DATE = re.compile(r"\d{4}-\d\d-\d\d")  # hydra's run folders are in outputs/<date>, by default


@contextmanager
def composing(arguments: Sequence[str]) -> Iterator[Callable[[], None]]:
    """While hydra composes, its errors are ConfigErrors; call what is yielded when the job begins.

    From then on an error is the job's, and hydra reports it as it always does.
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
        raise told(error, arguments) from error
    except OSError as error:
        if composed or error.filename is None or str(error.filename).endswith(".yaml"):  # a config that cannot be read
            raise
        way_out = "Set hydra.run.dir to a folder of yours"
        raise ConfigError("hydra.run.dir", str(error.filename), f"cannot be made: {error.strerror}", way_out) from error
    finally:
        begin()


def told(error: Exception, arguments: Sequence[str]) -> ConfigError:
    """What hydra, omegaconf or the YAML parser refused, with the override that brought it about."""
    text, cause = str(error) or str(error.__cause__), error.__cause__
    if isinstance(error, MissingConfigException):
        return _no_config(error)
    if isinstance(error, SearchPathException):
        folder = (re.findall(r"'(.+?)'", text) or [None])[0]
        return ConfigError("--config-dir", folder, "there is no such folder", "Name the folder that holds the config")
    if isinstance(error, OverrideParseException):
        key, value = _split(error.override)
        quoted = _quoted(key, value or "")
        way_out = f"Quote what has signs in it: '{key}={quoted}'"
        return ConfigError(key, value, f"cannot be read ({_first(text)})", way_out)
    override = _culprit(text, arguments)
    if override is None:
        way_out = "Mend the config, or the override that this is about"
        return ConfigError("config", None, f"hydra cannot compose it: {_both(text, cause)}", way_out)
    key, value = _split(override)
    if override.startswith("~") and "does not exist" in text:
        return ConfigError(key, value, "is not there to be deleted", f"Leave {override} out")
    if "appears more than once" in text or "An item is already" in text or "Multiple values for" in text:
        return ConfigError(key, value, "is there already, and + only adds", f"Write {override.lstrip('+')}")
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) or "Could not override" in text:
        return ConfigError(key, value, "is not a known key", _near_keys(key, override, cause))
    return ConfigError(key, value, f"hydra refuses it: {_both(text, cause)}", f"Write {key}=<value> as it can be taken")


def _quoted(key: str, value: str) -> str:
    """How hydra would take it: a list of texts, or a text."""
    if value.startswith("["):
        return '["...","..."]'
    text = '"..."' if set(value) & set("\"'") else f'"{value}"'
    return f"[{text}]" if key in LISTS else text


def _no_config(error: MissingConfigException) -> ConfigError:
    group, _, name = (error.missing_cfg_file or "").rpartition("/")
    reason, options = _first(str(error)), list(error.options or [])
    if not group:
        way_out = "Name a config (without .yaml) of the folder that --config-dir gives, or give that folder"
        return ConfigError("--config-name", name or None, "there is no such config", way_out)
    way_out = nearest(name, options) if options else f"Name a config of the group {group}"
    return ConfigError(group, name, f"there is no such config ({reason})", way_out)


def _culprit(text: str, arguments: Sequence[str]) -> str | None:
    """The override that a message names: the longest one, by its key between quotes or as the message's subject."""
    overrides = [one for one in arguments if re.match(r"[+~]*[\w@./:-]+(=|$)", one) and not one.startswith("-")]
    named = [one for one in overrides if re.search(rf"(?<![\w.]){re.escape(_split(one)[0])}(?![\w.])", text)]
    return max(named, key=lambda one: len(_split(one)[0]), default=None)


def _split(override: str) -> tuple[str, str | None]:
    key, given, value = override.lstrip("+~").partition("=")
    return key, value if given else None


def _near_keys(key: str, override: str, cause: BaseException | None) -> str:
    """The nearest keys of the config in which the key was not found, and how a new one is added."""
    node = getattr(cause, "parent_node", None)
    root = node._get_root() if isinstance(node, DictConfig) else None
    known = GROUPS + ([] if root is None else list(_keys(OmegaConf.to_container(root), "")))
    likeness = {one: _likeness(key, one) for one in get_close_matches(key, known, n=2 * NEAR, cutoff=0.75)}
    least = max([LIKE, *(value - ABOUT for value in likeness.values())])
    near = sorted((one for one in likeness if likeness[one] >= least), key=lambda one: -likeness[one])
    # Whoever knows the name but not where it is.
    last = key.rpartition(".")[2]
    near += [one for one in known if one.rpartition(".")[2] == last and one not in near]
    hint = f"Did you mean {' or '.join(near[:NEAR])}? " if near else ""
    if key.startswith("seamless."):  # which takes no others
        return f"{hint}Valid: {', '.join(one for one in known if one.startswith('seamless.'))}"
    return f"{hint}A key that is new is added as +{override.lstrip('+')}"


def _likeness(key: str, other: str) -> float:
    """The last part counts again: it is where one is mistyped."""
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
    said = [_first(text), _first(str(cause or ""))]
    return ": ".join(one.rstrip(".") for one in dict.fromkeys(said) if one)


def remove_run_folder(folder: Path) -> None:
    """Remove hydra's run folder of a refused run, when nothing is in it but what hydra made a moment ago.

    A log that something was written to, or any file of another kind, keeps all of it.
    """
    own = folder / ".hydra"
    entries = set(folder.iterdir()) - {own}
    logs = {one for one in entries if one.suffix == ".log" and one.is_file() and not one.stat().st_size}
    settings = set(own.iterdir()) if own.is_dir() else set()
    if entries != logs or not {one.name for one in settings} <= HYDRAS:
        return
    for file in (*logs, *settings):
        file.unlink()
    parents = [folder.parent, folder.parent.parent] if BY_DATE.fullmatch(folder.parent.name) else []
    for empty in (own, folder, *parents):
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()
