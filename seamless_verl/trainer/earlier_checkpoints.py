"""Checkpoints of earlier starts of a run, which verl's rotation does not know.

`trainer.max_actor_ckpt_to_keep` counts what a process has saved. So each resumed start would leave as many full
checkpoints behind for ever: a run that is resumed often fills its disk.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from seamless_verl.runtime.checkpoint_marker import saved_steps, step_folder

MANAGERS = ("checkpoint_mananager", "checkpoint_manager")  # verl spells Megatron's so


def all_steps(folder: Path, loaded: int) -> list[int]:
    """The steps that have a checkpoint in the folder, whole or not, up to the one that was loaded, ascending."""
    return sorted(step for step in saved_steps(folder) if step <= loaded)


def earlier_steps(folder: Path, loaded: int) -> list[int]:
    """Those of `all_steps` that have an actor's checkpoint."""
    return [step for step in all_steps(folder, loaded) if (step_folder(folder, step) / "actor").is_dir()]


def loaded_from(config: Any) -> Path:
    """The folder of the checkpoints from which a resumed run goes on; of another run, with a path of its own."""
    if config.trainer.resume_mode == "resume_path":
        return Path(os.path.abspath(config.trainer.resume_from_path)).parent
    return Path(os.path.abspath(config.trainer.default_local_dir))


def adopt(engine: Any, paths: list[str]) -> None:
    """The engine's rotation counts these checkpoints as its own, oldest first."""
    manager = next(getattr(engine, name) for name in MANAGERS if hasattr(engine, name))
    manager.previous_saved_paths = [*paths, *manager.previous_saved_paths]
