"""Where a run saves: it alone, and nothing half-written stays there after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from seamless_verl.config.checks.modes import VERL_MODES
from seamless_verl.config.checks.resuming import ELSEWHERE, FOLDER, IN_USE
from seamless_verl.errors import ConfigError
from seamless_verl.locks import only_writer
from seamless_verl.supervisor import joins_cluster
from seamless_verl.trainer.partial import Left, announce, discard_partial


def stays(config: DictConfig) -> bool:
    """Whether what is written is on this machine, as far as it can be told."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address")
    joins = joins_cluster(os.environ | ({"RAY_ADDRESS": address} if address else {}))
    return not joins and "://" not in config.trainer.default_local_dir


@contextmanager
def writing_alone(config: DictConfig) -> Iterator[None]:
    """Meanwhile no other run writes into this one's folder: ConfigError where one does already."""
    folder = config.trainer.default_local_dir
    writes = config.trainer.save_freq > 0 or config.trainer.v1.trainer_mode not in VERL_MODES
    with ExitStack() as held:
        try:
            if writes and stays(config):
                held.enter_context(only_writer(Path(folder)))
        except BlockingIOError:  # it began since this one was checked
            raise ConfigError(FOLDER, folder, IN_USE, ELSEWHERE) from None
        yield


def announce_checkpoints(config: DictConfig) -> None:
    """Let the supervisor remove what this run leaves half-written.

    Not in a cluster that goes on without this run: whether a save still goes on there it cannot tell.
    """
    if config.trainer.save_freq > 0 and stays(config):
        left = announce(
            config.trainer.default_local_dir,
            async_save=bool(config.actor_rollout_ref.actor.checkpoint.get("async_save", False)),
            seamless=config.trainer.v1.trainer_mode not in VERL_MODES,
        )
        tell(left, "an earlier run was killed")


def tidy_checkpoints(run_file: Path) -> None:
    """In the supervisor, when every process of the run is gone."""
    try:
        left = discard_partial(run_file)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"A half-written checkpoint may be left: {error}\n")
        return
    tell(left, "the run ended")


def tell(left: Left, end: str) -> None:
    for folder in left.removed:
        sys.stderr.write(f"Removed {folder}: {end} while it was written\n")
    for folder in left.spoilt:
        sys.stderr.write(f"{folder} is not whole: {end} while it was written anew\n")
