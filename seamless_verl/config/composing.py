"""Hydra composes the config: where it finds verl's files and ours, its errors as ConfigErrors, its run folder.

`pkg://verl.trainer.config` would import verl, and with it torch, before a typing mistake could be reported; so
hydra gets the directory. A search-path plugin works with every feature of hydra, and a user's own `--config-path`
may name `ppo_trainer` or `seamless_ppo_trainer` in its defaults.

Hydra's message of a mistake becomes the reason of a ConfigError, with the override and a way out. The folder that hydra
makes for a refused run is removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from seamless_verl.config.words import misread_of
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
        raise ConfigError(option, name, "is not a platform", nearest_platform(name, names))
    return name


def nearest_platform(name: str, names: Sequence[str]) -> str:
    """A way out for a name that is no platform's. By its letters `gpu` is nearest to `cpu`."""
    return "Did you mean accelerator?" if name.lower() in OF_ACCELERATORS else nearest(name, names)


OF_ACCELERATORS = {"gpu", "cuda", "nvidia", "rocm", "npu"}  # names under which other libraries know one


FULL_ERROR = "HYDRA_FULL_ERROR"  # hydra then raises what it would otherwise print
GROUPS = ["platform", "model_engine"]  # can be chosen on the command line although they are no keys
OURS = "seamless."
SUGGESTIONS = 3  # for a mistyped key, at most
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
    """What hydra, omegaconf or the YAML parser refused, in its words, with the override that did it and a way out."""
    cause = error.__cause__
    lines = [next((line.strip() for line in str(one or "").splitlines() if line.strip()), "") for one in (error, cause)]
    text = ": ".join(line.rstrip(".") for line in dict.fromkeys(lines) if line)
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        way_out = (
            (nearest_platform if group == "platform" else nearest)(name, list(error.options or []))
            if group
            else "Leave --config-name and --config-path out, or give its --config-dir"
        )
        return ConfigError(group or "--config-name", name or None, f"there is no such config ({text})", way_out)
    if isinstance(error, OverrideParseException):
        if (mistake := misread_of(error.override, arguments)) is not None:
            return mistake
        key, value = _split(error.override)
        quoted = "..." if set(value or "") & set("\"'") else value
        return ConfigError(key, value, f"cannot be read ({text})", f"Quote special characters: '{key}=\"{quoted}\"'")
    override = _named_override(str(error) or str(cause), arguments)
    if override is None:
        way_out = "Correct the config, or the override that the message is about"
        return ConfigError("config", None, f"hydra cannot compose it: {text}", way_out)
    key, value = _split(override)
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) or "Could not override" in text:
        return _unknown(key, value, override, cause)
    way_out = f"Write it as hydra accepts it, or leave {override} out"
    return ConfigError(key, value, f"hydra refuses it: {text}", way_out)


def _named_override(text: str, arguments: Sequence[str]) -> str | None:
    """The override that a message names: the longest one, by its key between quotes or as the message's subject."""
    # only a deletion has no value; another word is that of an option, such as a config's name
    overrides = [one for one in arguments if re.match(r"[+~]*[\w@./:-]+=|~[\w@./:-]+$", one) and one[0] != "-"]
    named = [one for one in overrides if re.search(rf"(?<![\w.]){re.escape(_split(one)[0])}(?![\w.])", text)]
    return max(named, key=lambda one: len(_split(one)[0]), default=None)


def _split(override: str) -> tuple[str, str | None]:
    key, given, value = override.lstrip("+~").partition("=")
    return key, value if given else None


def _unknown(key: str, value: str | None, override: str, cause: BaseException | None) -> ConfigError:
    """A key that the config lacks: of another of verl's engines, or with the nearest ones of the config."""
    from seamless_verl.config.verl_keys import DEFAULT_ENGINE, ENGINE, MOVED, engine_keys, engines, items_of

    node = getattr(cause, "parent_node", None)
    root = node._get_root() if isinstance(node, DictConfig) else OmegaConf.create()
    current = root.get(ENGINE)
    other = next((name for name in engines() if name != current and key in engine_keys(name)), None)
    if other is not None and current is not None:
        default = ", verl's default engine" if other == DEFAULT_ENGINE else ""
        reason = f"has no {key}, which {ENGINE}={other} has{default}"
        return ConfigError(ENGINE, current, reason, f"Add {ENGINE}={other}")
    if key in MOVED:
        return ConfigError(key, value, "is not a key of verl 0.9.1", MOVED[key])
    known = GROUPS + [name for name, _ in items_of(OmegaConf.to_container(root)) if not name.startswith("hydra.")]
    last = key.rpartition(".")[2]
    near = [name for name in known if name.rpartition(".")[2] == last]  # the last part is known, its node is not
    near = [*get_close_matches(key, known, n=SUGGESTIONS, cutoff=0.85), *near][:SUGGESTIONS]
    hint = f"Did you mean {' or '.join(dict.fromkeys(near))}? " if near else ""
    return ConfigError(key, value, "is not a known key", f"{hint}A new key is added as +{override.lstrip('+')}")


def for_hydra(arguments: Sequence[str]) -> list[str]:
    """The arguments with `++` where hydra would refuse a key that this package knows how to refuse, or to take.

    All settings of our node come through, so that its schema says all mistakes there at once. So do keys that only our
    platform files set: verl takes `+key` for them, and hydra would refuse it because of our file.
    """
    ours, changed = _platform_keys() if any(text.startswith("+") for text in arguments) else set[str](), []
    for text in arguments:
        key = _split(text)[0]
        own = text.startswith("+") and not text.startswith("++") and key in ours
        ours -= {key} if own else set()
        is_node = key.startswith(OURS) and "=" in text and not text.startswith("~")
        changed.append(f"++{text.lstrip('+')}" if own or is_node else text)
    return changed


def _platform_keys() -> set[str]:
    """Keys that only this package's platform files set: verl lacks them, or has no value there."""
    from seamless_verl.config.verl_keys import engine_config, items_of, read_yaml

    verls = dict(items_of(engine_config("megatron")))
    files = (HERE / "platform").glob("*.yaml")
    ours = (key for file in files for key, value in items_of(read_yaml(file)) if not isinstance(value, Mapping))
    return {key for key in ours if verls.get(key) is None}


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
