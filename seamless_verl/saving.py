"""Where a run saves: it alone, and nothing half-written stays there after it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from seamless_verl.config.checks.modes import VERL_MODES
from seamless_verl.errors import ConfigError
from seamless_verl.locks import only_writer
from seamless_verl.supervisor import joins_cluster
from seamless_verl.trainer.partial import Left, announce, discard_partial


def saves_here(config: DictConfig) -> bool:
    """Whether checkpoints are on this machine, as far as it can be told."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address")
    joins = joins_cluster(os.environ | ({"RAY_ADDRESS": address} if address else {}))
    return config.trainer.save_freq > 0 and not joins


@contextmanager
def saving_alone(config: DictConfig) -> Iterator[None]:
    """Meanwhile no other run saves where this one does: ConfigError when one does already."""
    key, folder = "trainer.default_local_dir", config.trainer.default_local_dir
    with ExitStack() as held:
        try:
            if saves_here(config):
                held.enter_context(only_writer(Path(folder)))
        except BlockingIOError:
            way_out = f"Set {key} to another folder, or trainer.save_freq=-1 to save nothing"
            raise ConfigError(key, folder, "another run saves its checkpoints there now", way_out) from None
        yield


def announce_checkpoints(config: DictConfig) -> None:
    """Let the supervisor remove what this run leaves half-written.

    Not in a cluster that goes on without this run: whether a save still goes on there it cannot tell.
    """
    if saves_here(config):
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
