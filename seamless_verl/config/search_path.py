"""Where hydra finds verl's configs and ours, without importing verl.

`pkg://verl.trainer.config` would import verl, and with it torch, before a typing mistake could be
reported; the directory is enough. A search-path plugin reaches every hydra feature and lets a
user's own `--config-path` name either `ppo_trainer` or `seamless_ppo_trainer` in its defaults.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

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
