"""What `check` refuses of a command line, without its process."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from functools import cache

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from seamless_verl.config import register_search_path
from seamless_verl.config.composing import HERE, config_error, for_hydra
from seamless_verl.errors import ConfigError
from seamless_verl.main_ppo import PLATFORM, check_overrides

NAME = "--config-name="


def mistakes_of(arguments: Sequence[str]) -> list[ConfigError]:
    """What `python -m seamless_verl.check` refuses, without its process: each command line is composed once."""
    words = for_hydra(arguments)
    try:
        config = composed(tuple(words))
        check_overrides(config, [word for word in words if not word.startswith("--")], anywhere=True)
    except ConfigError as error:
        return list(error.mistakes)
    return []


def composed(parts: tuple[str, ...]) -> DictConfig:
    """A new config of options and choices of configs."""
    config: DictConfig = pickle.loads(_pickled(os.environ.get(PLATFORM), parts))
    return config


@cache
def _pickled(platform: str | None, parts: tuple[str, ...]) -> bytes:
    """Read back in a seventh of the time in which a config is copied."""
    register_search_path()
    names = [text.removeprefix(NAME).removesuffix(".yaml") for text in parts if text.startswith(NAME)]
    choices = [text for text in parts if not text.startswith("--")]
    try:
        with initialize_config_dir(str(HERE), version_base=None):
            return pickle.dumps(compose(*names or ["seamless_ppo_trainer"], choices))
    except (HydraException, OmegaConfBaseException) as error:
        raise config_error(error, choices) from error
